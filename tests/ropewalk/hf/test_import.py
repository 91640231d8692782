"""Import of models of transformers: their logits, refusals, damaged and hostile folders."""

import json

import pytest
import torch
from conftest import edit, pe_options
from hf_models import GPT2, SIZES, TOKENS, VOCAB, assert_both_ways, assert_same_logits, hf_model, network
from safetensors.torch import load_file, save, save_file

from conf.files import copy_files
from ropewalk.hf import read_model

WINDOWS = dict(num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"], sliding_window=10)
UNTIED = dict(tie_word_embeddings=False, attention_bias=True)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
BOTH = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
GEMMA3 = SIZES | WINDOWS | dict(hidden_size=16, head_dim=8, query_pre_attn_scalar=24)  # of 16 the root is exact
KINDS = {
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied, exact": ("gpt2", GPT2 | dict(tie_word_embeddings=False, activation_function="gelu", n_inner=40)),
    "llama biased": ("llama", SIZES | dict(attention_bias=True, mlp_bias=True)),
    "llama attention biased": ("llama", SIZES | dict(attention_bias=True)),
    "llama head_dim": ("llama", SIZES | dict(head_dim=16)),
    "mistral head_dim": ("mistral", SIZES | dict(sliding_window=None, hidden_size=38, head_dim=10)),
    "mistral window": ("mistral", SIZES | dict(sliding_window=TOKENS, use_sliding_window=False)),  # has no such switch
    "qwen2": ("qwen2", SIZES | dict(tie_word_embeddings=True)),
    "qwen2 window": ("qwen2", SIZES | dict(use_sliding_window=True, sliding_window=10, max_window_layers=0)),
    "qwen3": ("qwen3", SIZES | dict(head_dim=8)),
    "qwen3 biased": ("qwen3", SIZES | dict(head_dim=16, attention_bias=True)),
    "smollm3": ("smollm3", SIZES | dict(num_hidden_layers=5, attention_bias=True, sliding_window=10)),
    "smollm3 at will": ("smollm3", SIZES | dict(no_rope_layers=[0, 1, 0], tie_word_embeddings=False)),
    "starcoder2": ("starcoder2", SIZES),
    "llama geglu": ("llama", SIZES | dict(hidden_act="gelu_pytorch_tanh")),
    "qwen3 some windows": ("qwen3", SIZES | WINDOWS | dict(use_sliding_window=True)),
    "smollm3 windows": ("smollm3", SIZES | WINDOWS | dict(use_sliding_window=True, no_rope_layers=[0, 1, 1])),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 scaled": ("gemma3_text", GEMMA3 | UNTIED | dict(rope_parameters=BOTH)),
    "olmo2": ("olmo2", SIZES),
    "olmo3": ("olmo3", SIZES | WINDOWS | dict(tie_word_embeddings=True, attention_bias=True)),
    "olmo3 scaled": ("olmo3", SIZES | WINDOWS | dict(rope_parameters=BOTH)),
}


@pytest.mark.parametrize("name", KINDS)
def test_models_are_read_and_written_with_the_same_logits(name, tmp_path):
    """Every architecture, with each setting that changes what it computes."""
    kind, options = KINDS[name]
    model = hf_model(kind, **options)
    model.save_pretrained(tmp_path / "in")
    assert_both_ways(model, tmp_path / "in")


@pytest.mark.parametrize("name", ["gemma3", "olmo3", "smollm3"])
def test_parts_of_a_pattern_are_named_as_in_its_preset(name, tmp_path):
    """Or a reading by the preset would take nothing over from the model."""
    kind, options = KINDS[name]
    hf_model(kind, **options).save_pretrained(tmp_path)
    assert set(read_model(tmp_path).pe["pattern"]) == set(pe_options(name)["pattern"])


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"model_type": "bloom"}, "has model_type='bloom'; these can be read: .*llama,"),
        ("llama", {"model_type": "gpt_oss"}, "has model_type='gpt_oss'; these can"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, r"softcapping=30.0 is not supported \(only None is\)"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("qwen2", {"is_causal": False}, "is_causal=False is not supported"),
        ("gemma3_text", {"rope_parameters": ..., "rope_scaling": {"type": "linear"}}, "type='linear' is not supported"),
        ("olmo3", {"sliding_window": None}, "sliding_window=None with layer_types=.* is not supported"),
        ("llama", {"hidden_act": "relu"}, "mlp='relu'"),
        ("llama", {"hidden_size": "wide"}, "hidden_size"),
        ("llama", {"mlp_bias": True}, "attention_bias=False with mlp_bias=True is not supported"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": "4.0"}}, r"cannot use a setting, .*'factor': '4.0'"),
        ("llama", {"rope_interleave": True}, "rope_interleave=True is not supported"),
        ("llama", {"sliding_window": 16}, r"pe\.window=16 is not supported"),
        ("llama", {"max_position_embeddings": 2**40}, "train_len=1099511627776 must be"),
        ("llama", {"num_hidden_layers": 1}, r"9 differ, such as model\.layers\.1\."),
        ("llama", {"hidden_size": 16, "head_dim": 8}, r"model\.embed_tokens\.weight"),
        ("llama", {"tie_word_embeddings": True}, "the head and the embedding differ"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(kind, change, message, tmp_path):
    """A setting that is passed over would be other logits without a word."""
    hf_model(kind, **dict(KINDS.values())[kind]).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", **change)
    with pytest.raises(ValueError, match=message):
        read_model(tmp_path).state_dict()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b'{"model_type": "lla', "config.json cannot be"),
        ("adapter_config.json", b"{}", "has an adapter"),
        (
            "model.safetensors",
            save({"lm_head.weight": torch.ones(VOCAB, 32)}, {"format": "pt"}),
            r"differ, such as model\.embed_tokens",
        ),
    ],
)
def test_damaged_and_missing_files_are_named(name, content, message, tmp_path):
    hf_model("llama", **SIZES).save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_model(tmp_path).state_dict()


def test_import_reads_shards_and_half_precision(tmp_path):
    model = hf_model("gpt2", **GPT2)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")

    assert_same_logits(network(read_model(tmp_path / "shards")), model, TOKENS)

    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert_same_logits(network(read_model(tmp_path / "half")), model.float(), TOKENS)


def test_buffers_of_old_files_are_no_weights(tmp_path):
    """GPT-2 as it was published: names without a prefix, and masks."""
    model = hf_model("gpt2", **GPT2)
    model.transformer.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    masks = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    weights = load_file(path) | masks
    save_file(weights, path, metadata={"format": "pt"})

    assert_same_logits(network(read_model(tmp_path)), model, TOKENS)

    weights["h.0.attn.extra"] = torch.ones(2)
    save_file(weights, path, metadata={"format": "pt"})

    with pytest.raises(ValueError, match=r"h\.0\.attn\.extra"):
        read_model(tmp_path).state_dict()


def test_code_and_pickles_of_a_folder_never_run(tmp_path):
    """A folder that asks for code of its own in every way there is, and has a pickle beside its weights, or as them."""
    model = hf_model("llama", **SIZES)
    model.save_pretrained(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"import pathlib; pathlib.Path({str(ran)!r}).touch()")
    (tmp_path / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {ran}'\ntR.".encode())
    auto = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    edit(tmp_path / "config.json", auto_map=auto, attn_implementation="evil/kernel", _attn_implementation="evil/kernel")

    assert_same_logits(network(read_model(tmp_path)), model, TOKENS)

    edit(tmp_path / "config.json", transformers_weights="pytorch_model.bin")
    with pytest.raises(ValueError, match="transformers_weights"):
        read_model(tmp_path)

    edit(tmp_path / "config.json", transformers_weights=...)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match="must be complete, and safetensors"):
        read_model(tmp_path).state_dict()
    assert not ran.exists()


def test_weights_outside_of_a_folder_are_not_read(tmp_path):
    """Neither through a link nor by the index of their parts."""
    folder = tmp_path / "model"
    hf_model("llama", **SIZES).save_pretrained(folder)
    outside = (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors").symlink_to(outside)

    with pytest.raises(ValueError, match="link out of its folder"):
        read_model(folder).state_dict()

    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(outside), "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ValueError, match=r"names .*, which is not in its folder"):
        read_model(folder).state_dict()


def test_a_folder_of_the_hubs_cache_is_read_through_its_links(tmp_path):
    """Other links are not followed: what is copied from a folder is its own."""
    model = hf_model("llama", **SIZES)
    folder = tmp_path / "snapshots" / "1"
    folder.mkdir(parents=True)
    model.save_pretrained(tmp_path / "blobs")
    for path in (tmp_path / "blobs").iterdir():
        (folder / path.name).symlink_to(f"../../blobs/{path.name}")

    assert_same_logits(network(read_model(folder)), model, TOKENS)

    copy_files(folder.glob("*.json"), tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())

    config = folder / "config.json"
    config.unlink()
    config.symlink_to((tmp_path / "blobs" / "config.json").rename(tmp_path / "secret"))

    with pytest.raises(ValueError, match="link out of its folder"):
        read_model(folder)
    with pytest.raises(ValueError, match="link out of its folder"):
        copy_files([config], tmp_path / "out")
