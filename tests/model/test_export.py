"""Export for transformers, read in a process that has transformers and none of our code."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, build_gpt
from hf_models import SIZES, VOCAB, edit, hf_model, tokens
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from model.pretrained import copy_tokenizer, export, load_pretrained
from scripts import export as script

TRAIN_LEN = 64


def preset(name: str, **replaced) -> dict:
    """conf/model/`name`.yaml, its defaults merged in, at a small size."""
    own = OmegaConf.load(ROOT / "conf" / "model" / f"{name}.yaml")
    merged = {}
    for parent in (p for p in own.pop("defaults", []) if p != "_self_"):
        merged |= preset(parent)
    n_kv_head = own.get("n_kv_head", merged.get("n_kv_head"))
    small = dict(n_layer=2, n_head=4, n_kv_head=n_kv_head and 2, dim=64)
    return merged | OmegaConf.to_container(own) | small | replaced


def built(encoding: str, model: str, pe=None, **replaced):
    net = build_gpt(encoding, vocab_size=VOCAB, train_len=TRAIN_LEN, pe=pe, **preset(model, **replaced))
    with torch.no_grad():
        for p in net.parameters():  # the initial ones are small, and say nothing of biases and norms
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.1, generator=torch.Generator().manual_seed(p.numel()))
    return net


ROTARY = {"rope", "linear", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope", "p_rope"}
MODELS = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_every_model_and_encoding_is_exported_or_refused(encoding, model, tmp_path):
    net, idx = built(encoding, model), tokens(64)
    if encoding in ROTARY or (encoding == "learned" and "llama" not in model):
        export(net, tmp_path / "out")
        again = load_pretrained(f"hf:{tmp_path / 'out'}").net(idx)
        torch.testing.assert_close(again, net(idx)[..., :VOCAB], rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(ValueError, match=r"cannot be exported|is not what .* of transformers has"):
            export(net, tmp_path / "out")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(encoding="cope", model="tiny"), r"the encoding CoPE cannot be exported; exported are pe=learned with"),
        (dict(encoding="xpos", model="tiny"), "the encoding XPos cannot be exported"),
        (dict(encoding="rope", model="tiny", mlp="swiglu"), r"model\.mlp=swiglu is not what Starcoder2ForCausalLM"),
        (dict(encoding="rope", model="tiny", qk_norm=True), r"model\.qk_norm=True is not what"),
        (dict(encoding="rope", model="llama_tiny", mlp="gelu"), r"model\.mlp=gelu is not what LlamaForCausalLM"),
        (dict(encoding="rope", model="llama_tiny", qk_norm=True, bias=True), r"model\.bias=True is not what Qwen3"),
        (dict(encoding="rope", model="llama_tiny", n_head=6, head_dim=8, bias=True, n_kv_head=2), "does not divide"),
        (
            dict(encoding="learned", model="llama_tiny"),
            r"model\.norm=rmsnorm and model\.mlp=swiglu and model\.n_kv_head=2",
        ),
        (dict(encoding="rope", model="tiny", pe={"fraction": 0.5}), r"pe\.fraction=0\.5 .* is not what Starcoder2"),
        (
            dict(encoding="rope", model="llama_tiny", bias=True, pe={"fraction": 0.5}),
            r"model\.bias=True is not what Phi3",
        ),
        (dict(encoding="p_rope", model="llama_tiny", pe={"fraction": 0.5}), "rope_type=proportional is not what Phi3"),
        (
            dict(encoding="longrope", model="llama_tiny", pe={"fraction": 0.5, "train_scale": 4.0}),
            r"partial_rotary_factor=0\.5 with attention_factor=1\.15\d* has no counterpart",
        ),
        (
            dict(encoding="yarn", model="llama_tiny", pe={"train_scale": 4.0, "beta_slow": 24.0, "ramp": "unrounded"}),
            "no channel lies between them",
        ),
        (dict(encoding="yarn", model="tiny", pe={"train_scale": 4.0, "ramp": "paper"}), r"pe\.ramp=paper cannot be"),
    ],
)
def test_what_transformers_lacks_is_refused_by_name(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export(built(**arguments), tmp_path / "out")


SCALED = ["linear", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope"]
PARTIAL = {"fraction": 0.5, "attention_factor": 1.0, "long_factor": [1.0, 1.5, 2.0, 4.0]}
FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
EXPORTS = {
    **{f"{name} scaled": dict(encoding=name, model="llama_tiny", pe={"scale": 4.0}) for name in SCALED},
    "dynamic_ntk within": dict(encoding="dynamic_ntk", model="llama_tiny", pe={"original_len": 128, "scale": 2.0}),
    "longrope beyond": dict(encoding="longrope", model="tiny", pe=FACTORS | {"scale": 4.0}),
    "longrope phi3": dict(encoding="longrope", model="llama_tiny", pe=PARTIAL | {"scale": 4.0}),
    "yarn options scaled": dict(encoding="yarn", model="tiny", pe={"ramp": "unrounded", "attention_factor": 1.2}),
    "phi3": dict(encoding="rope", model="llama_tiny", pe={"fraction": 0.5, "layout": "interleaved"}),
    "extended": dict(encoding="yarn", model="tiny", pe={"original_len": 32, "beta_fast": 8.0}),
    "unscaled": dict(encoding="yarn", model="llama_tiny"),
    "p_rope": dict(encoding="p_rope", model="llama_tiny"),
    "interleaved": dict(encoding="rope", model="llama_tiny", pe={"layout": "interleaved", "base": 500.0}),
    "qwen2": dict(encoding="yarn", model="llama_tiny", bias="qkv", pe={"layout": "interleaved"}),
    "qwen3": dict(encoding="rope", model="llama_tiny", qk_norm=True, pe={"layout": "interleaved"}),
    "mistral": dict(encoding="rope", model="llama_tiny", head_dim=8, n_head=6, n_kv_head=2),
    "llama biased": dict(encoding="rope", model="llama_tiny", bias=True, head_dim=32, vocab_multiple=64),
    "llama attention biased": dict(encoding="rope", model="llama_tiny", bias="attention", tie_embeddings=False),
    "starcoder2": dict(encoding="rope", model="tiny", n_kv_head=2),
    "starcoder2 biased": dict(encoding="rope", model="tiny", bias=True, mlp="gelu_exact", vocab_multiple=64),
    "gpt2": dict(encoding="learned", model="tiny"),
    "gpt2 biased": dict(encoding="learned", model="small", bias=True, tie_embeddings=False, hidden_dim=40),
    "learned scaled": dict(encoding="learned", model="tiny", pe={"scale": 2.0}),
}
NEW = 64  # tokens generated, across TRAIN_LEN but where the prompt is beyond it
PROMPTS = dict.fromkeys(EXPORTS, 40) | {"longrope beyond": 72, "longrope phi3": 72}
# Beyond their original length these two turn all keys otherwise than before. A cache of transformers keeps those that
# it has as they are, ours does not; without a cache all agree.
CACHED = EXPORTS.keys() - {"dynamic_ntk scaled", "longrope scaled"}
UNCACHED = ["dynamic_ntk scaled", "longrope scaled", "yarn scaled", "extended"]

THEIRS = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
idx = load_file("idx.safetensors")["idx"]
prompts, uncached = json.loads(Path("plan.json").read_text())
torch.set_grad_enabled(False)
for name, prompt in prompts.items():
    model = AutoModelForCausalLM.from_pretrained(name)
    longest = getattr(model.config, "n_positions", 256)
    said = dict(max_new_tokens=64, do_sample=False, output_logits=True, return_dict_in_generate=True)
    results = {}
    for way in ("cached", "uncached") if name in uncached else ("cached",):
        out = model.generate(idx[:, :prompt], use_cache=way == "cached", **said)
        results |= {way: torch.stack(out.logits, 1), f"{way} greedy": out.sequences[:, prompt:]}
    results["full"] = model(idx[:, :longest]).logits  # last: dynamic NTK remembers the longest text
    save_file({key: value.contiguous() for key, value in results.items()}, f"{name}.safetensors")
assert not {"model", "conf", "data"} & sys.modules.keys()
"""


@pytest.fixture(scope="module")
def read_by_transformers(tmp_path_factory):
    """The networks of `EXPORTS`, and what a new process that has transformers alone gets of their exports."""
    folder, nets = tmp_path_factory.mktemp("exports"), {}
    for name, arguments in EXPORTS.items():
        net = nets[name] = built(**arguments)
        if name in ("unscaled", "extended"):
            export(net, folder / name)
        else:
            with net.reading(lambda pe: pe.readings()[-1]):
                export(net, folder / name)
    (folder / "plan.json").write_text(json.dumps([PROMPTS, UNCACHED]))
    save_file({"idx": tokens(256)}, folder / "idx.safetensors")
    # -I: neither the working directory nor PYTHONPATH is searched
    done = subprocess.run(
        [sys.executable, "-I", "-c", THEIRS],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Unrecognized" not in done.stderr, done.stderr
    return nets, {name: load_file(folder / f"{name}.safetensors") for name in EXPORTS}


@pytest.mark.parametrize("name", EXPORTS)
@torch.no_grad()
def test_export_is_read_by_transformers_alone(name, read_by_transformers):
    nets, results = read_by_transformers
    net, theirs = nets[name], results[name]
    number = 0 if name in ("unscaled", "extended") else -1
    idx, close = tokens(256), dict(rtol=1e-5, atol=1e-5)
    with net.reading(lambda pe: pe.readings()[number]) as pe:
        assert theirs["full"].size(1) == min(256, pe.max_len or 256)
        assert theirs["full"].std() > 0.3
        torch.testing.assert_close(theirs["full"], net(idx[:, : theirs["full"].size(1)])[..., :VOCAB], **close)
        prompt = idx[:, : PROMPTS[name]]
        if name in CACHED:
            greedy = torch.stack(list(net.generate(prompt, NEW, temperature=0)), dim=1)
            assert torch.equal(theirs["cached greedy"], greedy)
            cache, pieces = net.new_cache(), (prompt, *greedy[:, :-1].split(1, dim=1))
            cached = torch.stack([net(piece, cache)[:, -1] for piece in pieces], dim=1)
            torch.testing.assert_close(theirs["cached"], cached[..., :VOCAB], **close)
        if name in UNCACHED:
            text, logits = prompt, []
            for _ in range(NEW):
                logits.append(net(text)[:, -1, :VOCAB])
                text = torch.cat((text, logits[-1].argmax(-1, keepdim=True)), dim=1)
            assert torch.equal(theirs["uncached greedy"], text[:, PROMPTS[name] :])
            torch.testing.assert_close(theirs["uncached"], torch.stack(logits, 1), **close)


@pytest.mark.parametrize("name", ["yarn scaled", "extended", "longrope phi3", "phi3", "llama3 scaled"])
def test_exports_have_the_old_rope_keys_too(name, tmp_path):
    """They say the same by themselves as the new ones do."""
    net = built(**EXPORTS[name])
    with net.reading(lambda pe: pe.readings()[0 if name == "extended" else -1]):
        export(net, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    whole = load_pretrained(f"hf:{tmp_path / 'out'}").pe
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000
    if name != "phi3":
        assert config["max_position_embeddings"] == (TRAIN_LEN if name == "extended" else 4 * TRAIN_LEN)
        assert config["rope_scaling"].items() <= config["rope_parameters"].items()
        assert config["rope_scaling"]["factor"] == 4
    edit(tmp_path / "out", rope_parameters=...)
    assert load_pretrained(f"hf:{tmp_path / 'out'}").pe == whole
    edit(tmp_path / "out", rope_parameters=config["rope_parameters"], rope_scaling=..., rope_theta=...)
    assert load_pretrained(f"hf:{tmp_path / 'out'}").pe == whole


def test_the_tokenizer_is_recorded_and_copied(tmp_path):
    hf_model("llama", **SIZES, eos_token_id=[3, 5]).save_pretrained(tmp_path / "in")
    content = '{"version": "1.0"}'
    (tmp_path / "in" / "tokenizer.json").write_text(content)
    pretrained = load_pretrained(f"hf:{tmp_path / 'in'}")
    assert pretrained.tokenizer == {
        "source": f"hf:{tmp_path / 'in'}",
        "files": {"tokenizer.json": hashlib.sha256(content.encode()).hexdigest()},
    }
    copy_tokenizer(pretrained, tmp_path / "kept")
    export(pretrained.net, tmp_path / "out", eos=pretrained.eos, tokenizer=tmp_path / "kept")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == content
    generation = [json.loads((tmp_path / d / "generation_config.json").read_text()) for d in ("in", "out")]
    assert generation[0] == generation[1]
    assert generation[1]["eos_token_id"] == [3, 5] == load_pretrained(f"hf:{tmp_path / 'out'}").eos


def test_export_overwrites_nothing_and_leaves_nothing_behind(tmp_path, monkeypatch):
    net = built("rope", "tiny")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("used", "used/file"):
        with pytest.raises(ValueError, match="exists and is not an empty folder"):
            export(net, tmp_path / name)
    export(net, tmp_path / "empty")
    assert load_pretrained(f"hf:{tmp_path / 'empty'}").vocab_size == VOCAB

    def full_disk(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("model.pretrained.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        export(net, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "used"]


def test_the_script_exports_a_run(train, tmp_path, capfd):
    assert train("pe=yarn", "name=mine", "pe.scale=4").code == 0
    for reading, kind, length in (("trained", "default", 16), ("scaled", "yarn", 64)):
        out = tmp_path / reading
        script.main({"run": str(train.runs / "mine"), "out": str(out), "reading": reading})
        config = json.loads((out / "config.json").read_text())
        assert config["rope_parameters"]["rope_type"] == kind
        assert (config["max_position_embeddings"], config["eos_token_id"], config["vocab_size"]) == (length, 256, 257)
    assert "Yarn, scale 4" in capfd.readouterr().out
