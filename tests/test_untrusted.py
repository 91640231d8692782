"""Files that come from elsewhere, damaged or hostile: one clear error before anything is written, and nothing runs."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import outcome_of

from scripts import evaluate, export, sample

QUICK = ("trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]")


class Bomb:
    """Pickled, it makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def script(monkeypatch, capfd):
    """`script(sample, "run=...", ...)` runs a script's command line within this process."""

    def run(program, *arguments: str):
        monkeypatch.setattr("sys.argv", [f"{program.__name__}.py", *arguments])
        capfd.readouterr()
        return outcome_of(program.main, capfd)

    return run


@pytest.fixture
def mark(tmp_path):
    """What a bomb makes; first a proof that it does."""
    path = tmp_path / "mark"
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.exists()
    path.unlink()
    yield path
    assert not path.exists()


def edited(change):
    """Damage to model.json: `change` gets what it says."""

    def damage(run: Path) -> None:
        values = json.loads((run / "model.json").read_text())
        change(values)
        (run / "model.json").write_text(json.dumps(values))

    return damage


# test_fuzz.py damages every file; here the reason must be said
DAMAGES = [
    (lambda run: (run / "model.json").unlink(), "model.json is missing: has the run finished training?"),
    (edited(lambda v: v.update(format=9)), "has format 9, this version reads 2"),
    (edited(lambda v: v["pe"].pop("_target_")), "model.json lacks '_target_'"),
    (edited(lambda v: v["pe"].update(bass=3)), "pe.bass=3"),
    (edited(lambda v: v["model"].update(dim=64)), "blocks.0.attn.out.weight"),
    (lambda run: os.truncate(run / "model.safetensors", 1000), "model.safetensors cannot be read"),
    (lambda run: (run / "data.json").write_text("{}"), "is not what it was trained on (tokenizer)"),
]


def test_a_damaged_run_is_named_with_the_reason(train, script, tmp_path):
    """As a base model, and by a script; all share what reads a run."""
    assert train("pe=rope", "name=base", *QUICK).code == 0
    base = train.runs / "base"
    shutil.copytree(base, tmp_path / "whole")
    for damage, message in DAMAGES:
        damage(base)
        for outcome in (
            train(f"init_from={base}", "pe=yarn", "name=child"), script(sample, f"run={base}", "prompt=a")
        ):  # fmt: skip
            assert (outcome.code, message in outcome.err) == (2, True), (message, outcome.err)
            assert str(base) in outcome.err
        shutil.rmtree(base)
        shutil.copytree(tmp_path / "whole", base)
    assert not (train.runs / "child").exists()


def test_a_hostile_run_runs_nothing(train, script, mark):
    train("pe=rope", "name=base", *QUICK)
    base = train.runs / "base"
    whole, model = (base / "config.yaml").read_text(), (base / "model.json").read_text()
    (base / "config.yaml").write_text(f"{whole}\nseed: !!python/object/apply:pathlib.Path.touch [{mark}]\n")
    assert "config.yaml cannot be read" in script(evaluate, f"run={base}").err
    for section, target in (("data", "os.system"), ("data", "subprocess.run"), ("pe", "pathlib.Path.touch")):
        values = yaml.safe_load(whole)
        values[section]["_target_"] = target
        (base / "config.yaml").write_text(yaml.safe_dump(values))
        assert target in script(evaluate, f"run={base}").err
    (base / "config.yaml").write_text(whole)
    edited(lambda v: v["pe"].update(_target_="pathlib.Path.touch"))(base)
    assert "pathlib.Path.touch" in script(sample, f"run={base}").err
    (base / "model.json").write_text(model)
    (base / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    assert "model.safetensors cannot be read" in train(f"init_from={base}", "name=child").err
    (base / "training.json").unlink()
    torch.save({"global_step": 9, "state_dict": Bomb(mark)}, base / "checkpoints" / "step=9.ckpt")
    outcome = train("pe=rope", "name=base", *QUICK)
    assert outcome.code == 0, outcome.err
    assert "step=9.ckpt is damaged" in outcome.err
    assert "after step 1" in outcome.out


@pytest.mark.parametrize("name", ["evals", "tokenizer/vocab.json"])
def test_a_run_reaches_nothing_outside_of_it(train, script, tmp_path, name):
    """By links in the run, or by the folder for data that its configuration names."""
    train("pe=rope", "name=base", *QUICK)
    base, outside = train.runs / "base", tmp_path / "outside"
    outside.mkdir()
    (outside / "step=9.ckpt").write_text("mine")
    config = (base / "config.yaml").read_text()
    (base / "config.yaml").write_text(config.replace(str(train.corpus.parent / "cache"), str(tmp_path / "theirs")))
    cache = f"cache_dir={train.corpus.parent / 'cache'}"
    assert script(evaluate, f"run={base}", cache).code == 0
    assert not (tmp_path / "theirs").exists()
    if (base / name).exists():
        shutil.rmtree(base / name)
    (base / name).parent.mkdir(exist_ok=True)
    (base / name).symlink_to(outside if "." not in name else outside / "step=9.ckpt")
    said = [
        script(evaluate, f"run={base}", cache), script(export, f"run={base}", f"out={tmp_path}/out"),
        script(sample, f"run={base}", "prompt=a"), train("pe=rope", "name=base", "trainer.max_steps=2"),
    ]  # fmt: skip
    assert all((o.code, "is a link, which is not followed" in o.err) == (2, True) for o in said), said
    assert [path.name for path in outside.iterdir()] == ["step=9.ckpt"]
    assert not (tmp_path / "out").exists()
