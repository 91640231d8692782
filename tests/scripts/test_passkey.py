"""scripts/passkey.py on real runs: what it writes, and what it answers to mistakes."""

import pytest
from conftest import ROOT, Outcome, outcome_of

import conf.cli
from evaluation.retrieval import Passkey

SMALL = ("depths=2", "trials=2")


@pytest.fixture
def passkey(monkeypatch, capfd):
    """`passkey("run=...", ...)` runs the script's command line within this process."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import passkey

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr("sys.argv", ["passkey.py", *arguments])
        capfd.readouterr()
        return outcome_of(lambda: conf.cli.script(passkey.main), capfd)

    return run


def labels(results: Passkey) -> list[str]:
    return list(dict.fromkeys([*results.skipped, *(cell.reading for cell in results.cells)]))


def test_every_reading_and_every_swap(train, passkey):
    assert train("pe=yarn", "train_len=64", "eval.lengths=[1]", "trainer.max_steps=2").code == 0
    run = train.runs / "yarn-text"
    said = passkey(f"run={run}", "lengths=[2,1]", *SMALL)
    assert said.code == 0, said.err
    assert "yarn-text: passkeys found" in said.out
    assert "by chance" in said.out
    results = Passkey.load(run / "passkey.json")
    assert (results.run, results.encoding, results.data, results.train_len) == ("yarn-text", "yarn", "text", 64)
    assert labels(results) == ["scale 1, as trained", "scale 4"]
    places = [(cell.length, cell.ratio, cell.depth) for cell in results.cells[:4]]
    assert places == [
        (64, 1, 0),
        (64, 1, 1),
        (128, 2, 0),
        (128, 2, 1),
    ]
    assert (run / "figures" / "passkey.png").exists()
    said = passkey(f"run={run}", "lengths=[2]", "pe=linear,yarn,rope", "pe.scale=8", *SMALL)
    assert said.code == 0, said.err
    assert Passkey.load(run / "passkey.json") == results
    swapped = Passkey.load(run / "passkey_swap.json")
    assert labels(swapped) == ["yarn, scale 1, as trained", "linear, scale 8", "yarn, scale 8", "rope"]
    own = [cell for cell in results.cells if cell.reading == "scale 1, as trained" and cell.length == 128]
    for name in ("yarn, scale 1, as trained", "rope"):  # trained at scale 1, which is RoPE
        cells = [cell for cell in swapped.cells if cell.reading == name]
        assert [cell.model_copy(update={"reading": own[0].reading}) for cell in cells] == own
    assert (run / "figures" / "passkey_swap.png").exists()


def test_mistakes_are_found_before_any_work(train, passkey):
    assert train("pe=rope", "train_len=64", "eval.lengths=[1]", "trainer.max_steps=2").code == 0
    run = train.runs / "rope-text"
    for arguments, message in (
        (["lengths=[1]"], "run is missing"),
        ([f"run={train.runs}/none"], f"there are: {run}"),
        ([f"run={run}", "length=[1]"], "did you mean lengths?"),
        ([f"run={run}", "lengths=1,2"], "lengths='1,2'"),
        ([f"run={run}", "lengths=[]"], "lengths='[]'"),
        ([f"run={run}", "lengths=[1,0]"], "lengths"),
        ([f"run={run}", "depths=1"], "depths='1'"),
        ([f"run={run}", "trials=many"], "trials='many'"),
        ([f"run={run}", "lengths=[0.5,1]"], "a text of 32 tokens has no room for a key"),
        ([f"run={run}", "pe=yarm"], "did you mean yarn?"),
        ([f"run={run}", "pe=cope"], "cannot read weights trained with rope"),
        ([f"run={run}", "pe=yarn", "pe.scale=0.5"], "pe.scale=0.5"),
        ([f"run={run}", "pe=yarn", "pe.beta_fats=3"], "did you mean pe.beta_fast?"),
    ):
        said = passkey(*arguments)
        assert (said.code, said.out) == (2, "")
        assert message in said.err
    assert not (run / "passkey.json").exists()


def test_a_task_has_no_text(train, passkey):
    assert (
        train(
            "experiment=flip_flop", "data=flip_flop", "pe=rope", "eval.lengths=[1]", "trainer.max_steps=2", "name=bits"
        ).code
        == 0
    )
    said = passkey(f"run={train.runs}/bits")
    assert (said.code, said.out) == (2, "")
    assert "was trained on the task flip_flop, not on text" in said.err
