"""Export for transformers: what it computes there, what is refused, and the files beside the weights."""

import json

import pytest
import torch
from conftest import build_gpt, pe_options
from hf_models import SIZES, VOCAB, edit, hf_model, network, tokens
from transformers import AutoModelForCausalLM

from model import serialization
from model.hf import copy_tokenizer, export, load
from model.hf.write import write

TRAIN_LEN = 64
HALF = {"partial_rotary_factor": 0.5}
MODELS = {"tiny": {"n_kv_head": None}, "llama": {"n_kv_head": 2, "norm": "rmsnorm", "mlp": "swiglu"}}


def built(encoding: str, model: str, pe=None, **cfg):
    net = build_gpt(encoding, vocab_size=VOCAB, train_len=TRAIN_LEN, pe=pe, **MODELS[model] | cfg)
    with torch.no_grad():
        for p in net.parameters():  # the initial ones are small, and say nothing of biases and norms
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.1, generator=torch.Generator().manual_seed(p.numel()))
    return net


ROTARY = {"rope", "linear", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope", "p_rope"}


@pytest.mark.parametrize("model", ["tiny", "llama"])
@torch.no_grad()
def test_every_encoding_is_exported_or_refused(encoding, model, tmp_path):
    parts = {key: dict(part) for key, part in pe_options(encoding).items() if isinstance(part, dict) and "pe" in part}
    pe = {key: pe_options(part.pop("pe"), **part) for key, part in parts.items()}
    net, idx = built(encoding, model, pe, n_layer=4), tokens(64)
    if encoding in ROTARY or (encoding == "learned" and model == "tiny"):
        write(net, tmp_path / "out")
        again = network(load(tmp_path / "out"))
        torch.testing.assert_close(again(idx), net(idx)[..., :VOCAB], rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(ValueError, match=r"cannot be exported|has no architecture"):
            write(net, tmp_path / "out")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(encoding="cope", model="tiny"), "the encoding CoPE cannot be exported"),
        (dict(encoding="alibi", model="tiny"), "the encoding ALiBi cannot be exported"),
        (dict(encoding="xpos", model="tiny"), "the encoding XPos cannot be exported"),
        (dict(encoding="rope", model="tiny", mlp="swiglu"), r"LlamaForCausalLM, cannot have model\.norm=layernorm"),
        (dict(encoding="rope", model="tiny", qk_norm=True), r"Starcoder2ForCausalLM, cannot have model\.qk_norm=True"),
        (dict(encoding="rope", model="llama", mlp="gelu"), r"LlamaForCausalLM, cannot have model\.mlp=gelu"),
        (
            dict(encoding="rope", model="llama", qk_norm=True, bias=True),
            r"LlamaForCausalLM, cannot have model\.qk",
        ),
        (dict(encoding="rope", model="llama", n_head=6, head_dim=8, bias=True, n_kv_head=2), r"model\.n_head=6"),
        (
            dict(encoding="learned", model="llama"),
            r"model\.norm=rmsnorm and model\.mlp=swiglu and model\.n_kv_head",
        ),
        (dict(encoding="learned", model="tiny", pe={"window": 8}), r"GPT2LMHeadModel, cannot have pe\.window=8"),
        (dict(encoding="rope", model="llama", bias=True, pe={"window": 8}), r"cannot have pe\.window=8"),
        (dict(encoding="rope", model="tiny", pe=HALF), r"Starcoder2ForCausalLM, cannot have pe\.partial_rotary_factor"),
        (dict(encoding="p_rope", model="llama", pe=HALF), "Phi3ForCausalLM of transformers cannot"),
        (
            dict(encoding="longrope", model="llama", pe=HALF | {"train_scale": 4.0}),
            "does not rotate and sharpen as LongRope does",
        ),
        (
            dict(encoding="yarn", model="llama", pe={"train_scale": 4.0, "beta_slow": 24.0, "ramp": "unrounded"}),
            "does not rotate and sharpen as Yarn does",
        ),
    ],
)
def test_what_transformers_lacks_is_refused_by_name(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write(built(**arguments), tmp_path / "out")


def test_a_pattern_over_layers_is_refused(tmp_path):
    net = built("rope", "llama")
    net.blocks[1].position, net._shared = build_gpt("rope", pe={"window": 4}).encodings[0], [0, None]
    with pytest.raises(ValueError, match="a pattern of encodings over the layers cannot be exported"):
        write(net, tmp_path / "out")


SCALED = ["linear", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope"]
FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
EXPORTS = {
    **{f"{name} scaled": dict(encoding=name, model="llama", pe={"scale": 4.0}) for name in SCALED},
    "dynamic_ntk within": dict(encoding="dynamic_ntk", model="llama", pe={"original_len": 128, "scale": 2.0}),
    "longrope beyond": dict(encoding="longrope", model="tiny", pe=FACTORS | {"scale": 4.0}),
    "linear phi3": dict(encoding="linear", model="llama", pe=HALF | {"scale": 4.0}),
    "yarn options scaled": dict(encoding="yarn", model="tiny", pe={"ramp": "unrounded", "attention_factor": 1.2}),
    "yarn of the paper": dict(encoding="yarn", model="tiny", pe={"ramp": "paper", "scale": 4.0}),
    "phi3": dict(encoding="rope", model="llama", pe=HALF | {"layout": "interleaved"}),
    "extended": dict(encoding="yarn", model="tiny", pe={"original_len": 32, "beta_fast": 8.0}),
    "p_rope": dict(encoding="p_rope", model="llama"),
    "interleaved": dict(encoding="rope", model="llama", pe={"layout": "interleaved", "base": 500.0}),
    "qwen2": dict(encoding="yarn", model="llama", bias="qkv", pe={"layout": "interleaved"}),
    "qwen3 window": dict(encoding="rope", model="llama", qk_norm=True, pe={"window": 20}),
    "mistral window": dict(encoding="rope", model="llama", pe={"window": 20}),
    "llama biased": dict(encoding="rope", model="llama", bias=True, head_dim=32, vocab_multiple=64),
    "starcoder2 biased": dict(encoding="rope", model="tiny", bias=True, mlp="gelu_exact", vocab_multiple=64),
    "starcoder2 window": dict(encoding="rope", model="tiny", pe={"window": 20}),
    "gpt2 biased": dict(encoding="learned", model="tiny", bias=True, tie_embeddings=False, hidden_dim=40),
    "learned scaled": dict(encoding="learned", model="tiny", pe={"scale": 2.0}),
}
NEW, PROMPT = 24, 52  # tokens: the text grows across TRAIN_LEN
# Beyond their original length dynamic NTK and LongRoPE rotate all keys otherwise than before. A cache of transformers
# keeps those that it has as they are, ours does not; without a cache all agree.
UNCACHED = {"dynamic_ntk scaled", "longrope scaled", "yarn scaled"}
CACHED = {"linear scaled", "yarn scaled", "extended", "qwen2", "qwen3 window", "mistral window", "phi3", "gpt2 biased"}


def scale_of(name: str, net) -> float:
    return net.scales[0 if name == "extended" else -1]


def greedy(net, idx: torch.Tensor, cached: bool) -> torch.Tensor:
    """Logits [B, NEW, V] of our network's most probable continuation."""
    logits, cache = [], net.new_cache()
    for i in range(NEW):
        logits.append(net(idx if i == 0 or not cached else idx[:, -1:], cache if cached else None)[:, -1, :VOCAB])
        idx = torch.cat((idx, logits[-1].argmax(-1, keepdim=True)), dim=1)
    return torch.stack(logits, 1)


@pytest.mark.parametrize("name", EXPORTS)
@torch.no_grad()
def test_an_export_opens_in_transformers(name, tmp_path):
    net, idx = built(**EXPORTS[name]), tokens(256)
    with net.at_scale(scale_of(name, net)):
        write(net, tmp_path / "out")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        for cached in [True] * (name in CACHED) + [False] * (name in UNCACHED):
            said = dict(max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True)
            theirs = torch.stack(model.generate(idx[:, :PROMPT], use_cache=cached, **said).logits, 1)
            torch.testing.assert_close(theirs, greedy(net, idx[:, :PROMPT], cached), rtol=1e-5, atol=1e-5)
        for length in (TRAIN_LEN - 1, min(256, net.max_len or 256)):
            theirs = model(idx[:, :length]).logits
            assert theirs.std() > 0.3
            torch.testing.assert_close(theirs, net(idx[:, :length])[..., :VOCAB], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["yarn scaled", "extended", "linear phi3", "phi3", "llama3 scaled"])
def test_exports_have_the_old_rope_keys_too(name, tmp_path):
    """They say the same by themselves as the new ones do."""
    net = built(**EXPORTS[name])
    with net.at_scale(scale_of(name, net)):
        write(net, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    whole = load(tmp_path / "out").pe
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000
    if name != "phi3":
        assert config["max_position_embeddings"] == (TRAIN_LEN if name == "extended" else 4 * TRAIN_LEN)
        assert config["rope_scaling"]["factor"] == 4
    edit(tmp_path / "out", rope_parameters=...)
    assert load(tmp_path / "out").pe == whole
    edit(tmp_path / "out", rope_parameters=config["rope_parameters"], rope_scaling=..., rope_theta=...)
    assert load(tmp_path / "out").pe == whole


def test_an_imported_model_is_exported_with_its_tokenizer(tmp_path):
    hf_model("llama", **SIZES | dict(eos_token_id=[3, 5])).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text('{"version": "1.0"}')
    pretrained, run = load(tmp_path / "in"), tmp_path / "run"
    copy_tokenizer(pretrained.folder, run / "tokenizer")
    serialization.save(network(pretrained), run, pe=pretrained.pe)
    assert export(run, tmp_path / "out") == "LlamaForCausalLM, default"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert load(tmp_path / "out").eos_token_id == [3, 5] == pretrained.eos_token_id
    export(run, tmp_path / "ours", eos_token_id=7)  # said once, not otherwise in each file
    said = [json.loads((tmp_path / "ours" / f"{name}.json").read_text()) for name in ("config", "generation_config")]
    assert [config["eos_token_id"] for config in said] == [7, 7]


def test_a_run_is_exported_at_one_of_its_scales_or_by_another_encoding(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    serialization.save(built("rope", "llama"), run, pe=pe_options("rope"))
    yarn = pe_options("yarn", scale=4.0)
    assert export(run, tmp_path / "a", pe=yarn) == "LlamaForCausalLM, default"
    assert export(run, tmp_path / "b", pe=yarn, scale=4.0) == "LlamaForCausalLM, yarn"
    with pytest.raises(ValueError, match=r"scale=8 is none of the encoding's, which are 1, 4: see pe\.scale"):
        export(run, tmp_path / "c", pe=yarn, scale=8.0)
    with pytest.raises(ValueError, match="scale=4 is none of the encoding's, which are 1"):
        export(run, tmp_path / "c", scale=4.0)


def test_export_overwrites_nothing_and_leaves_nothing_behind(tmp_path, monkeypatch):
    net = built("rope", "tiny")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("used", "used/file"):
        with pytest.raises(ValueError, match="exists and is not an empty folder"):
            write(net, tmp_path / name)
    write(net, tmp_path / "empty")
    assert load(tmp_path / "empty").vocab_size == VOCAB

    def full_disk(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("model.hf.write.write_text", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write(net, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "used"]
