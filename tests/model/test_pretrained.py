"""Import of Hugging Face weights, against transformers: logits, refusals, damaged folders."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import GPT2, SIZES, TOKENS, assert_round_trip, assert_same_logits, edit, hf_model
from safetensors.torch import load_file, save_file

from model.pretrained import load_pretrained

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


@pytest.mark.parametrize("name", KINDS)
def test_import_gives_the_logits_of_transformers(name, tmp_path):
    kind, options = KINDS[name]
    model = hf_model(kind, **options)
    model.save_pretrained(tmp_path / "in")
    pretrained = load_pretrained(f"hf:{tmp_path / 'in'}")
    for length in (TOKENS, 2 * TOKENS):
        assert_same_logits(pretrained.net, model, length)
    assert_round_trip(pretrained, tmp_path / "out")


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
