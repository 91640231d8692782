"""Patterns over layers, named after models, that cannot be written: every attention layer as in transformers."""

import pytest
import torch
from conftest import build_gpt, pe_options
from hf_models import SIZES, hf_model, tokens

from model.position.layer import make_context

L, T = 16, 60  # tokens of the training length, and of the text
INTERLEAVED = {"layout": "interleaved"}
SCALED = {"train_scale": 8.0, "scale": 8.0, "original_len": L}
PRESETS = {
    "llama4": {
        "kind": "llama4_text",
        "rotation": {"rope_type": "default", "rope_theta": 500_000.0},
        "theirs": {"attention_chunk_size": 64, "floor_scale": L, "use_qk_norm": False, "intermediate_size_mlp": 8},
        "window": 64,
        "ours": {},
        "parts": {"local": INTERLEAVED, "global": {}},
    },
    "rnope_swa": {
        "kind": "cohere2",
        "rotation": {"rope_type": "default", "rope_theta": 10_000.0},
        "theirs": {"sliding_window": 9},
        "window": 9,
        "ours": {},
        "parts": {"local": INTERLEAVED, "global": {}},
    },
    "gpt_oss": {
        "kind": "gpt_oss",
        "rotation": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "original_max_position_embeddings": L,
            "factor": 8.0,
            "truncate": False,
        },
        "theirs": {"sliding_window": 9},
        "window": 9,
        "ours": {"bias": "attention", "sinks": True},
        "parts": {"local": SCALED, "global": SCALED},
    },
}


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_every_layer_attends_as_in_transformers(name):
    """Which have a window, frequencies, temperature, sinks; for what goes in and out of each in a network of theirs."""
    preset = PRESETS[name]
    n_layer = len(pe_options(name)["pattern"]) + 1
    sizes = SIZES | {"head_dim": 8, "num_experts_per_tok": 1, "num_local_experts": 2, "num_hidden_layers": n_layer}
    model = hf_model(preset["kind"], **sizes, **preset["theirs"], rope_parameters=preset["rotation"])
    seen = []

    def keep(module, positional, named, output):
        seen.append((named["hidden_states"], output[0]))

    theirs = [layer.self_attn for layer in model.model.layers]
    for attention in theirs:
        attention.register_forward_hook(keep, with_kwargs=True)
    model(tokens(T))

    parts = {}
    for part, changes in preset["parts"].items():
        parts[part] = pe_options(name)[part] | changes
        if parts[part]["window"]:
            parts[part]["window"] = preset["window"]
    shape = {"n_layer": n_layer, "n_head": 4, "n_kv_head": 2, "dim": 32, "norm_eps": 1e-6}
    net = build_gpt(name, pe=parts, train_len=L, **shape, **preset["ours"])
    for i, (x, expected) in enumerate(seen):
        pe = net.encodings[i]
        ours = net.blocks[i].attn
        ours.load_state_dict(our_names(theirs[i].state_dict()))
        out = ours(x, pe, make_context(pe, torch.arange(T), T, T))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert expected.std() > 0.1


def our_names(weights):
    """Weights of an attention layer of transformers under our names."""
    renamed = {name: tensor for name, tensor in weights.items() if "_proj" not in name}
    for kind in ("weight", "bias"):
        if f"q_proj.{kind}" in weights:
            parts = [weights[f"{part}_proj.{kind}"] for part in "qkv"]
            renamed[f"qkv.{kind}"] = torch.cat(parts)
            renamed[f"out.{kind}"] = weights[f"o_proj.{kind}"]
    return renamed
