"""Patterns over layers, named after models, that cannot be written: every attention layer as in transformers."""

import pytest
import torch
from conftest import PRESETS, build_gpt, pe_options
from hf_models import SIZES, hf_model, tokens
from test_export import EXPORTS

from model.position.layer import make_context

WINDOW, L = 9, 16
YARN = {"rope_type": "yarn", "original_max_position_embeddings": L, "factor": 8.0}
SCALED = {"train_scale": 8.0, "scale": 8.0, "original_len": L}
SMALL = dict(sliding_window=WINDOW, head_dim=8, num_experts_per_tok=1, num_local_experts=2, intermediate_size_mlp=8)
CHUNKS = {"attention_chunk_size": 64, "floor_scale": L, "use_qk_norm": False}
LOCAL = {"layout": "interleaved", "window": 64}
SINKS = {"bias": "attention", "sinks": True}
KINDS = {  # transformers' name, its rotation and what else it needs; our architecture, and options of the two parts
    "llama4": ("llama4_text", {"rope_type": "default", "rope_theta": 500_000.0}, CHUNKS, {}, LOCAL, {}),
    "rnope_swa": ("cohere2", {"rope_type": "default", "rope_theta": 10_000.0}, {}, {}, {"layout": "interleaved"}, {}),
    "gpt_oss": ("gpt_oss", YARN | {"rope_theta": 150_000.0, "truncate": False}, {}, SINKS, SCALED, SCALED),
}


@pytest.mark.parametrize("name", sorted({*PRESETS} - {*EXPORTS}))
@torch.no_grad()
def test_every_layer_attends_as_in_transformers(name):
    """Which have a window, frequencies, temperature, sinks; for what goes in and out of each in a network of theirs."""
    kind, rotation, theirs, cfg, *changes = KINDS[name]
    options = pe_options(name)
    pe = {part: options[part] | new for part, new in zip(dict.fromkeys(options["pattern"]), changes, strict=True)}
    for part in pe.values():
        part["window"] = part["window"] and max(WINDOW, changes[0].get("window", 0))
    n_layer = len(options["pattern"]) + 1
    sizes = SIZES | SMALL | {"num_hidden_layers": n_layer} | theirs
    model, seen = hf_model(kind, **sizes, rope_parameters=rotation), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, args, kw, out: seen.append((kw, out[0])), with_kwargs=True)
    model(tokens(60))
    cfg = cfg | dict(n_layer=n_layer, n_head=4, n_kv_head=2, dim=32, norm_eps=1e-6)
    net, pos = build_gpt(name, pe=pe, train_len=L, **cfg), torch.arange(60)
    for i, (block, layer, (given, expected)) in enumerate(zip(net.blocks, model.model.layers, seen, strict=True)):
        weights = layer.self_attn.state_dict()
        for key in {key.rpartition(".")[2] for key in weights if "_proj" in key}:
            weights[f"qkv.{key}"] = torch.cat([weights.pop(f"{x}_proj.{key}") for x in "qkv"])
            weights[f"out.{key}"] = weights.pop(f"o_proj.{key}")
        block.attn.load_state_dict(weights)
        encoding = net.encodings[i]
        out = block.attn(given["hidden_states"], encoding, make_context(encoding, pos, 60, 60), None, i)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert expected.std() > 0.1
