"""Files that come from elsewhere, damaged or hostile: one clear error before anything is written, and nothing runs."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, snapshot
from safetensors.torch import load_file, save_file

from scripts import evaluate, report, sample

QUICK = ("trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]")


class Bomb:
    """Pickled, it makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def edited(change):
    """Damage to model.json: `change` gets what it says."""

    def damage(run: Path) -> None:
        values = json.loads((run / "model.json").read_text())
        values.pop("checksum", None)  # whoever makes such a file can make this as well
        change(values)
        (run / "model.json").write_text(json.dumps(values))

    return damage


def weights_as(change):
    """Damage to the weights: `change` gets one tensor, and model.json the hash of what it returns."""

    def damage(run: Path) -> None:
        weights = load_file(run / "model.safetensors")
        weights["norm.weight"] = change(weights["norm.weight"])
        save_file(weights, run / "model.safetensors")
        digest = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
        edited(lambda v: v.update(sha256=digest))(run)

    return damage


def an_unknown_option(run: Path) -> None:
    """Damage to both files that describe the network, so that neither contradicts the other."""
    edited(lambda v: v["pe"].update(bass=3))(run)
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["pe"]["bass"] = 3
    (run / "config.yaml").write_text(yaml.safe_dump(values))


# test_fuzz.py damages every file; here the reason must be said.
DAMAGES = {
    "model.json is missing: has the run finished training?": lambda run: (run / "model.json").unlink(),
    "has format 9, this version reads 2": edited(lambda v: v.update(format=9)),
    "pe._target_ is None, and 'model.position.rotary.Rotary' in config.yaml": edited(lambda v: v["pe"].pop("_target_")),
    "pe.bass is 3, and None in": edited(lambda v: v["pe"].update(bass=3)),
    "pe.bass: there is no such key": an_unknown_option,
    "model.dim is 64, and": edited(lambda v: v["model"].update(dim=64)),
    "is not what it was trained on (tokenizer)": lambda run: (run / "data.json").write_text("{}"),
    "norm.weight (torch.float32) must hold finite": weights_as(lambda t: t * torch.inf),
    "norm.weight (torch.int32) must hold finite": weights_as(lambda t: t.int()),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_run_is_named_with_the_reason(straight, script, tmp_path, message):
    base = shutil.copytree(straight("pe=rope"), tmp_path / "base")
    DAMAGES[message](base)
    outcome = script(sample, f"run={base}", "prompt=a")
    assert outcome.code == 2
    assert message in outcome.err
    assert str(base) in outcome.err


@pytest.fixture
def stranger(train):
    """A run from elsewhere."""
    assert train("pe=rope", "name=base", *QUICK).code == 0
    return train.runs / "base"


@pytest.fixture
def mark(tmp_path):
    """The file that a bomb makes, as is proved here."""
    path = tmp_path / "mark"
    pickle.loads(pickle.dumps(Bomb(path)))
    path.unlink()
    yield path
    assert not path.exists()


def test_a_hostile_configuration_runs_nothing(stranger, script, mark):
    config = stranger / "config.yaml"
    whole = config.read_text()
    config.write_text(f"{whole}\nseed: !!python/object/apply:pathlib.Path.touch [{mark}]\n")
    assert "config.yaml cannot be read" in script(evaluate, f"run={stranger}").err
    for section, target in (("data", "os.system"), ("data", "subprocess.run"), ("pe", "pathlib.Path.touch")):
        values = yaml.safe_load(whole)
        values[section]["_target_"] = target
        config.write_text(yaml.safe_dump(values))
        assert target in script(evaluate, f"run={stranger}").err
    config.write_text(whole)
    edited(lambda v: v["pe"].update(_target_="pathlib.Path.touch"))(stranger)
    assert "pathlib.Path.touch" in script(sample, f"run={stranger}").err


def test_a_hostile_file_of_weights_runs_nothing(stranger, train, mark):
    (stranger / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    assert "model.safetensors cannot be read" in train(f"init_from={stranger}", "name=child").err


def test_a_hostile_checkpoint_runs_nothing(stranger, train, mark):
    (stranger / "training.json").unlink()
    torch.save({"global_step": 9, "state_dict": Bomb(mark)}, stranger / "checkpoints" / "step=9.ckpt")
    outcome = train("pe=rope", "name=base", *QUICK)
    assert outcome.code == 0, outcome.err
    assert "step=9.ckpt is damaged" in outcome.err
    assert "after step 1" in outcome.out


def test_results_that_lie_elsewhere_are_not_reported(stranger, script, tmp_path):
    (stranger / "evals").rename(tmp_path / "elsewhere")
    (stranger / "evals").symlink_to(tmp_path / "elsewhere")
    outcome = script(report, f"folders=[{stranger.parent}]", "format=csv")
    assert outcome.code == 0
    assert f"{stranger}/evals is a link" in outcome.err


def test_a_strangers_run_reads_no_variable_of_the_environment(train, script, monkeypatch):
    """What it holds would be in folders, pages and uploads that are published."""
    secret = "hunter" * 3  # written so, it does not stand in the diff of this file, which a run keeps
    monkeypatch.setenv("SECRET", secret)
    text = "${oc.env:SECRET}"
    train("pe=rope", "name=base", *QUICK)
    base = train.runs / "base"
    edited(lambda v: v["pe"].update(name=text))(base)
    values = yaml.safe_load((base / "config.yaml").read_text())
    values["pe"]["name"] = text
    values["eval"]["variants"] = [{"pe": "yarn", "name": f"yarn {text}"}]
    (base / "config.yaml").write_text(yaml.safe_dump(values))

    assert script(evaluate, f"run={base}").code == 0
    assert train(f"init_from={base}", *QUICK).code == 0
    child = train.runs / f"base-{text}-16"
    assert yaml.safe_load((child / "config.yaml").read_text())["pe"]["name"] == text
    for path, content in snapshot(train.runs).items():
        assert secret not in str(path)
        assert secret.encode() not in content, path


def test_a_strangers_run_chooses_no_yaml_of_its_own_as_an_encoding(train, script, monkeypatch):
    """Hydra would compute what that holds."""
    monkeypatch.setenv("SECRET", "hunter2")
    train("pe=rope", "name=base", *QUICK)
    base = train.runs / "base"
    (base / "mine.yaml").write_text("# @package pe\nname: ${oc.env:SECRET}\n")
    values = yaml.safe_load((base / "config.yaml").read_text())
    values["eval"]["variants"] = [{"pe": os.path.relpath(base / "mine", ROOT / "conf" / "pe")}]
    (base / "config.yaml").write_text(yaml.safe_dump(values))
    code, out, err = script(evaluate, f"run={base}")
    assert (code, "is no name of an encoding" in err, "hunter2" in out + err) == (2, True, False)
