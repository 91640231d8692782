"""Import of Hugging Face weights, against transformers: logits, rope settings of both styles, damaged folders."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import GPT2, SIZES, TOKENS, edit, hf_model, tokens
from safetensors.torch import load_file, save_file

from model.pretrained import export, load_pretrained

KINDS = {
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied, exact": ("gpt2", GPT2 | dict(tie_word_embeddings=False, activation_function="gelu", n_inner=40)),
    "llama": ("llama", SIZES),
    "llama tied": ("llama", SIZES | dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "llama biased": ("llama", SIZES | dict(attention_bias=True, mlp_bias=True)),
    "llama attention biased": ("llama", SIZES | dict(attention_bias=True)),
    "llama head_dim": ("llama", SIZES | dict(head_dim=16)),
    "mistral": ("mistral", SIZES | dict(sliding_window=None)),
    "mistral head_dim": ("mistral", SIZES | dict(sliding_window=None, hidden_size=38, head_dim=10)),
    "qwen2": ("qwen2", SIZES | dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", SIZES | dict(head_dim=8)),
    "qwen3 biased": ("qwen3", SIZES | dict(head_dim=16, attention_bias=True)),
    "starcoder2": ("starcoder2", SIZES),
}
ORIGINAL = {"original_max_position_embeddings": TOKENS}
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5} | ORIGINAL,
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0} | ORIGINAL,
    "longrope": {"factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]} | ORIGINAL,
    "proportional": {"partial_rotary_factor": 0.5},
}


def hf_rope(kind: str, **parameters):
    rope = {"rope_type": kind, "rope_theta": 500.0} | ROPES[kind] | parameters
    return hf_model("llama", **SIZES | dict(rope_parameters=rope))


@torch.no_grad()
def assert_same_logits(net, model, length: int) -> None:
    theirs = model(tokens(length)).logits
    assert theirs.std() > 0.3
    torch.testing.assert_close(net(tokens(length)), theirs, rtol=1e-5, atol=1e-5)


def assert_round_trip(pretrained, folder: Path) -> None:
    export(pretrained.net, folder)
    again = load_pretrained(f"hf:{folder}")
    assert again.describe() | {"tokenizer": None} == pretrained.describe() | {"tokenizer": None}
    ours, theirs = again.net.state_dict(), pretrained.net.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", KINDS)
def test_import_gives_the_logits_of_transformers(name, tmp_path):
    kind, options = KINDS[name]
    model = hf_model(kind, **options)
    model.save_pretrained(tmp_path / "in")
    pretrained = load_pretrained(f"hf:{tmp_path / 'in'}")
    for length in (TOKENS, 2 * TOKENS):
        assert_same_logits(pretrained.net, model, length)
    assert_round_trip(pretrained, tmp_path / "out")


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("style", ["new", "old"])
def test_import_reads_every_rope_type(kind, style, tmp_path):
    model = hf_rope(kind)
    model.save_pretrained(tmp_path / "in")
    if style == "old":
        old = {key: value for key, value in model.config.rope_parameters.items() if key != "rope_theta"}
        old["type"] = old.pop("rope_type")
        edit(tmp_path / "in", rope_parameters=..., rope_theta=500.0, rope_scaling=None if kind == "default" else old)
    pretrained = load_pretrained(f"hf:{tmp_path / 'in'}")
    assert (pretrained.train_len, pretrained.original_len) == (TOKENS, TOKENS)
    for length in (TOKENS, 2 * TOKENS):
        assert_same_logits(pretrained.net, model, length)
    assert_round_trip(pretrained, tmp_path / "out")


def test_rope_types_differ_where_they_should():
    """Else the test above could not fail."""
    with torch.no_grad():
        logits = {kind: hf_rope(kind)(tokens(2 * TOKENS)).logits for kind in ROPES}
    for a in ROPES:
        assert all((logits[a] - logits[b]).abs().max() > 0.1 for b in ROPES if a != b)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("yarn", {"truncate": False}, "truncate=False has no counterpart"),
        (
            "yarn",
            {"attention_factor": 1.5},
            r"attention_factor=1\.5 multiplies queries and keys by 1\.5; only 1\.13863",
        ),
        ("yarn", {"mscale": 1.0, "mscale_all_dim": 0.5}, r"mscale=1, mscale_all_dim=0\.5"),
        ("yarn", {"rope_type": "su"}, r"rope_type='su' cannot be read; these can: default, linear"),
        ("yarn", {"factor": 0.5}, r"pe\.scale=0\.5 must be at least 1"),
        ("yarn", {"mrope_section": [1, 1, 2]}, r"mrope_section=\[1, 1, 2\] means nothing to rope_type='yarn'"),
        ("longrope", {"attention_factor": 1.0}, r"attention_factor=1 multiplies"),
        ("longrope", {"factor": 1.0}, "'longrope' with factor=1"),
        ("longrope", {"short_factor": [1.0]}, r"pe\.short_factor has 1 divisors, but a head has 4"),
        ("dynamic", {"original_max_position_embeddings": 16}, "max_position_embeddings=32: remove it"),
        ("linear", {"factor": None}, "rope_type='linear' needs factor"),
        ("llama3", {"low_freq_factor": 0.0}, r"pe\.low_freq_factor=0 must lie"),
        ("llama3", {"low_freq_factor": None}, "rope_type='llama3' needs low_freq_factor"),
        ("proportional", {"factor": 2.0}, r"factor=2\.0 has no counterpart"),
        ("default", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 has no counterpart"),
        ("default", {"factor": 2.0}, r"factor=2\.0 means nothing to rope_type='default'"),
    ],
)
def test_rope_settings_without_a_counterpart_are_refused_by_name(kind, changes, message, tmp_path):
    hf_rope(kind).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path, rope_parameters=config["rope_parameters"] | changes)
    with pytest.raises(ValueError, match=message):
        load_pretrained(f"hf:{tmp_path}")


def test_sharpening_that_says_the_default_is_read(tmp_path):
    for kind, changes in (
        ("yarn", {"mscale": 1.0, "mscale_all_dim": 0.0}),
        ("yarn", {"attention_factor": 1.1386294361}),
        ("longrope", {"attention_factor": 1.1832159566}),
    ):
        model = hf_rope(kind, **changes)
        model.save_pretrained(tmp_path / "in")
        assert_same_logits(load_pretrained(f"hf:{tmp_path / 'in'}").net, model, TOKENS)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "llama",
            {"model_type": "bloom"},
            r"is LlamaForCausalLM \(model_type='bloom'\); these can be read: gpt2, llama",
        ),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu' cannot be honoured; these can: silu"),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"hidden_size": "wide"}, "hidden_size='wide' must be a positive integer"),
        ("llama", {"rope_theta": 7.0}, r"says both rope_theta=7\.0 and rope_theta=500\.0"),
        ("llama", {"mlp_bias": True}, "mlp_bias=true without attention_bias"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("llama", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
        ("mistral", {"sliding_window": 16}, "sliding_window=16 hides part of max_position_embeddings=32"),
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 8192}, "sliding_window=4096 hides part"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ...}, "sliding_window=16 hides"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "without layer_types"),
        ("starcoder2", {"use_bias": False}, "use_bias=false"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
    ],
)
def test_architectures_that_cannot_be_honoured_are_refused_by_name(kind, changes, message, tmp_path):
    rope = {} if kind == "gpt2" else {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    options = KINDS[kind][1] | rope
    hf_model(kind, **options).config.save_pretrained(tmp_path)
    edit(tmp_path, **({"architectures": ["LlamaForCausalLM"]} | changes))
    with pytest.raises(ValueError, match=message):
        load_pretrained(f"hf:{tmp_path}")


def test_import_reads_shards_and_files_of_the_bare_model(tmp_path):
    model = hf_model("gpt2", **GPT2)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    model.transformer.save_pretrained(tmp_path / "bare")  # names without a prefix, as in the published GPT-2
    bare = load_file(tmp_path / "bare" / "model.safetensors")
    assert "wte.weight" in bare
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "bare" / "model.safetensors")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for folder in ("shards", "bare"):
        assert_same_logits(load_pretrained(f"hf:{tmp_path / folder}").net, model, TOKENS)


def test_half_precision_weights_are_read_exactly(tmp_path):
    hf_model("llama", **SIZES).to(torch.bfloat16).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(load_pretrained(f"hf:{tmp_path}").net, model, TOKENS)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def retensor(change):
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return damage


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index(**places):
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return damage


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"model\.safetensors cannot be read .*: is it complete\?"),
        (pickle_only, r"as pickle \(pytorch_model\.bin\), which may run code"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has no model\.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "lla'), r"config\.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json cannot be read"),
        (retensor(lambda w: w.pop(NORM)), r"lacks norm\.weight"),
        (retensor(lambda w: w.update(more=torch.ones(2))), "config.json does not describe: more"),
        (retensor(lambda w: w.update({NORM: torch.ones(2)})), r"another shape .*: norm\.weight"),
        (retensor(lambda w: w.update({NORM: torch.ones(32).double()})), r"model\.norm\.weight in .* is torch\.float64"),
        (index(a="gone.safetensors"), r"lacks gone\.safetensors: is the download complete"),
        (index(a="../model.safetensors"), "is not an index of files beside it"),
        (lambda folder: edit(folder, num_hidden_layers=1), r"does not describe: layers\.1\.\S+ .* and 4 more"),
        (lambda folder: edit(folder, model_type="qwen2"), r"lacks layers\.0\.self_attn\.k_proj\.bias"),
        (
            lambda folder: edit(folder, tie_word_embeddings=True),
            r"lm_head\.weight is embed_tokens\.weight, but it differs",
        ),
    ],
)
def test_a_damaged_folder_is_a_clear_error(damage, message, tmp_path):
    hf_model("llama", **SIZES).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        _ = load_pretrained(f"hf:{tmp_path}").net


def test_what_the_hub_does_not_give_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"hf:no-such/model is no local folder, .*offline, give a folder"):
        load_pretrained("hf:no-such/model")
    with pytest.raises(ValueError, match=r"hf:/no/such/folder is no local folder"):
        load_pretrained("hf:/no/such/folder")
