"""Files that come from elsewhere, damaged or hostile: one clear error before anything is written, and nothing runs."""

import pickle
from pathlib import Path

import pytest
import torch
from conftest import edit, snapshot

from scripts import evaluate, sample

QUICK = ("trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]")


class Bomb:
    """Pickled, it makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


# test_fuzz.py damages every file; here the reason must be said.
DAMAGES = {
    "model.json is missing: has the run finished training?": lambda run: (run / "model.json").unlink(),
    "is not what it was trained on (tokenizer)": lambda run: (run / "data.json").write_text("{}"),
    "has format 9, this version reads 2": lambda run: edit(run / "model.json", format=9),
    "pe.bass: there is no such key": lambda run: edit(run / "model.json", "pe", bass=3),
}


@pytest.fixture
def stranger(trained):
    """A run from elsewhere."""
    return trained("pe=rope", *QUICK, name="base")


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_run_is_named_with_the_reason(stranger, script, message):
    DAMAGES[message](stranger)
    assert message in script(sample, f"run={stranger}", "prompt=a", code=2).err


@pytest.fixture
def mark(tmp_path):
    """The file that a bomb makes, as is proved here."""
    path = tmp_path / "mark"
    pickle.loads(pickle.dumps(Bomb(path)))
    path.unlink()
    yield path
    assert not path.exists()


@pytest.mark.parametrize(
    ("section", "target"), [("data", "os.system"), ("data", "subprocess.run"), ("pe", "pathlib.Path.touch")]
)
def test_a_hostile_configuration_runs_nothing(stranger, script, section, target):
    """Nor does one in model.json, which has no data."""
    edit(stranger / "config.yaml", section, _target_=target)

    assert target in script(evaluate, f"run={stranger}", code=2).err

    if section == "pe":
        edit(stranger / "model.json", section, _target_=target)
        assert target in script(sample, f"run={stranger}", code=2).err


def test_a_tag_of_yaml_runs_nothing(stranger, script, mark):
    with (stranger / "config.yaml").open("a") as file:
        file.write(f"\nseed: !!python/object/apply:pathlib.Path.touch [{mark}]\n")
    assert "config.yaml cannot be read" in script(evaluate, f"run={stranger}", code=2).err


def test_a_hostile_file_of_weights_runs_nothing(stranger, train, mark):
    (stranger / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    assert "model.safetensors cannot be read" in train(f"init_from={stranger}", "name=child", code=2).err


def test_a_hostile_checkpoint_runs_nothing(stranger, train, mark):
    (stranger / "training.json").unlink()
    torch.save({"global_step": 9, "state_dict": Bomb(mark)}, stranger / "checkpoints" / "step=9.ckpt")
    outcome = train("pe=rope", "name=base", *QUICK)
    assert "step=9.ckpt is damaged" in outcome.err
    assert "after step 1" in outcome.out


SECRET = "hunter" * 3  # written so, it does not stand in the diff of this file, which a run keeps


def test_a_strangers_run_reads_no_variable_of_the_environment(stranger, train, script, monkeypatch):
    """What it holds would be in folders, pages and uploads that are published."""
    monkeypatch.setenv("SECRET", SECRET)
    text = "${oc.env:SECRET}"
    edit(stranger / "model.json", "pe", name=text)
    edit(stranger / "config.yaml", "pe", name=text)
    edit(stranger / "config.yaml", "eval", variants=[{"pe": "yarn", "name": f"yarn {text}"}])

    script(evaluate, f"run={stranger}")
    train(f"init_from={stranger}", *QUICK)
    for path, content in snapshot(train.runs).items():
        assert SECRET not in str(path)
        assert SECRET.encode() not in content, path
