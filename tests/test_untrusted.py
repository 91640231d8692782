"""Files that come from elsewhere, damaged or hostile: one clear error before anything is written, and nothing runs."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import outcome_of
from safetensors.torch import load_file, save_file

from scripts import evaluate, export, sample


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


def retensored(change):
    def damage(run: Path) -> None:
        tensors = load_file(run / "model.safetensors")
        change(tensors)
        save_file(tensors, run / "model.safetensors")

    return damage


def cut(name: str, length: int):
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:length])


def without(name: str):
    return lambda run: (run / name).unlink()


DAMAGES = [
    (without("model.json"), "model.json is missing: has the run finished training?"),
    (cut("model.json", 100), "model.json cannot be read"),
    (lambda run: (run / "model.json").write_text("[]"), "model.json cannot be read (it is no JSON object)"),
    (edited(lambda v: v.update(format=9)), "has format 9, this version reads 2"),
    *(
        (edited(lambda v, key=key: v.pop(key)), f"model.json lacks '{key}'")
        for key in ("pe", "model", "vocab_size", "train_len")
    ),
    (edited(lambda v: v["pe"].pop("_target_")), "model.json lacks '_target_'"),
    (edited(lambda v: v["pe"].update(bass=3)), "unexpected keyword argument 'bass'"),
    (edited(lambda v: v["pe"].update(_target_="os.system")), "'os.system' is not a PositionEncoding"),
    (edited(lambda v: v.update(train_len="long")), "model.json is damaged"),
    (edited(lambda v: v["model"].update(n_layer="many")), "n_layer='many'"),
    (edited(lambda v: v["model"].update(dim=64)), "blocks.0.attn.out.weight"),
    (without("model.safetensors"), "model.safetensors cannot be read"),
    (cut("model.safetensors", 1000), "model.safetensors cannot be read"),
    (retensored(lambda w: w.pop("norm.weight")), "norm.weight differ in name or shape"),
    (retensored(lambda w: w.update({"norm.weight": torch.ones(3)})), "norm.weight differ in name or shape"),
]


QUICK = ("trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]")


def test_a_damaged_base_model_is_named_with_the_reason(train, tmp_path):
    assert train("pe=rope", "name=base", *QUICK).code == 0
    base = train.runs / "base"
    shutil.copytree(base, tmp_path / "whole")
    for damage, message in [
        DAMAGES[0],  # test_scripts_refuse_a_damaged_run has them all
        (edited(lambda v: v.pop("pe")), "model.json lacks 'pe'"),
        (edited(lambda v: v["model"].update(dim=64)), "blocks.0.attn.out.weight"),
        (cut("model.safetensors", 1000), "model.safetensors cannot be read"),
        (cut("data.json", 1), "data.json cannot be read"),
        (lambda run: (run / "data.json").write_text("{}"), "is not what it was trained on (tokenizer)"),
    ]:
        damage(base)
        outcome = train(f"init_from={base}", "pe=yarn", "name=child")
        assert (outcome.code, message in outcome.err) == (2, True), (message, outcome.err)
        assert str(base) in outcome.err
        assert not (train.runs / "child").exists()
        shutil.rmtree(base)
        shutil.copytree(tmp_path / "whole", base)


def test_scripts_refuse_a_damaged_run(train, script, tmp_path):
    assert train("pe=rope", "name=base", *QUICK).code == 0
    base = train.runs / "base"
    shutil.copytree(base, tmp_path / "whole")
    cache = train.corpus.parent / "cache"
    for damage, message in DAMAGES:
        damage(base)
        for program, more in ((evaluate, f"cache_dir={cache}"), (export, f"out={tmp_path}/out"), (sample, "prompt=a")):
            outcome = script(program, f"run={base}", more)
            assert (outcome.code, message in outcome.err) == (2, True), (message, outcome.err)
        shutil.rmtree(base)
        shutil.copytree(tmp_path / "whole", base)
    assert not (tmp_path / "out").exists()


def test_a_hostile_checkpoint_runs_nothing(train, mark):
    train("pe=rope", "eval.lengths=[1]")
    run = train.runs / "rope-text"
    (run / "training.json").unlink()
    torch.save({"global_step": 9, "state_dict": Bomb(mark)}, run / "checkpoints" / "step=9.ckpt")
    outcome = train("pe=rope", "eval.lengths=[1]")
    assert outcome.code == 0, outcome.err
    assert "step=9.ckpt is damaged" in outcome.err
    assert "after step 6" in outcome.out


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
    outcome = train(f"init_from={base}", "name=child")
    assert outcome.code == 2
    assert "model.safetensors cannot be read" in outcome.err


@pytest.mark.parametrize("name", ["evals", "checkpoints", "tokenizer/vocab.json"])
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
    for program, more in ((evaluate, cache), (export, f"out={tmp_path}/out"), (sample, "prompt=a")):
        outcome = script(program, f"run={base}", more)
        assert (outcome.code, "is a link, which is not followed" in outcome.err) == (2, True)
    outcome = train("pe=rope", "name=base", "trainer.max_steps=2", "eval.lengths=[1]")
    assert (outcome.code, "is a link, which is not followed" in outcome.err) == (2, True)
    assert [path.name for path in outside.iterdir()] == ["step=9.ckpt"]
    assert not (tmp_path / "out").exists()


def test_prompts_outside_of_the_vocabulary(train, script):
    """Bytes can write everything; the symbols of a task cannot."""
    train("data=flip_flop", "pe=rope", "train_len=32", "name=task", *QUICK)
    outcome = script(sample, f"run={train.runs / 'task'}", "prompt='w 1 x'")
    assert "'x' is not a symbol of this task; there is: " in outcome.err
