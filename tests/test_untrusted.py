"""Files that come from elsewhere, damaged or hostile: one clear error before anything is written, and nothing runs."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from conf import cli
from model.checkpoints import checkpoints_in
from model.pretrained import load_pretrained
from scripts import evaluate, export, sample


class Bomb:
    """Pickled, it makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


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
    (edited(lambda v: v.update(format=9)), "has format 9, this version reads 1"),
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


def test_a_damaged_parent_is_named_with_the_reason(train, tmp_path):
    assert train("pe=rope", "name=base", "trainer.max_steps=1", "eval.lengths=[1]").code == 0
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


def test_scripts_refuse_a_damaged_run(train, tmp_path):
    assert train("pe=rope", "name=base", "trainer.max_steps=1", "eval.lengths=[1]").code == 0
    base = train.runs / "base"
    shutil.copytree(base, tmp_path / "whole")
    for damage, message in DAMAGES:
        damage(base)
        for script, more in (
            (evaluate, {"eval.lengths": "[1]"}),
            (export, {"out": str(tmp_path / "out")}),
            (sample, {"prompt": "knots"}),
        ):
            with pytest.raises(ValueError, match=r".") as caught:
                script.main({"run": str(base), **more})
            assert message in cli.explain(caught.value)
        shutil.rmtree(base)
        shutil.copytree(tmp_path / "whole", base)
    assert not (tmp_path / "out").exists()


def test_a_hostile_checkpoint_runs_nothing(train, mark):
    train("pe=rope", "eval.lengths=[1]")
    run = train.runs / "rope-text"
    (run / "results.json").unlink()
    torch.save({"global_step": 9, "state_dict": Bomb(mark)}, run / "checkpoints" / "step=9.ckpt")
    outcome = train("pe=rope", "eval.lengths=[1]")
    assert outcome.code == 0, outcome.err
    assert "step=9.ckpt is damaged" in outcome.err
    assert "after step 6" in outcome.out
    assert checkpoints_in(run / "checkpoints")


def test_a_hostile_run_runs_nothing(train, mark):
    train("pe=rope", "name=base", "eval.lengths=[1]", "trainer.max_steps=1")
    base = train.runs / "base"
    whole = (base / "config.yaml").read_text()
    (base / "config.yaml").write_text(f"{whole}\nseed: !!python/object/apply:pathlib.Path.touch [{mark}]\n")
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read"):
        evaluate.main({"run": str(base)})
    for section, target in (("data", "os.system"), ("data", "subprocess.run"), ("pe", "pathlib.Path.touch")):
        values = yaml.safe_load(whole)
        values[section]["_target_"] = target
        (base / "config.yaml").write_text(yaml.safe_dump(values))
        with pytest.raises(ValueError, match=target.replace(".", r"\.")):
            evaluate.main({"run": str(base)})
    (base / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    outcome = train(f"init_from={base}", "name=child")
    assert outcome.code == 2
    assert "model.safetensors cannot be read" in outcome.err


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
def test_a_hostile_import_runs_nothing(weights, mark, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "hostile"
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    config.auto_map = {"AutoModelForCausalLM": "bomb.Model", "AutoConfig": "bomb.Config"}
    config.save_pretrained(folder)
    (folder / "bomb.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    (folder / weights).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match=r"as pickle \(pytorch_model\.bin\)|model\.safetensors cannot be read"):
        _ = load_pretrained(f"hf:{folder}").net


def test_prompts_outside_of_the_vocabulary(train):
    """Bytes can write everything; the symbols of a task cannot."""
    train("data=flip_flop", "pe=rope", "train_len=32", "trainer.max_steps=1", "eval.lengths=[1]", "name=task")
    with pytest.raises(ValueError, match="'x' is not a symbol of this task; there is: "):
        sample.main({"run": str(train.runs / "task"), "prompt": "w 1 x"})
