"""Patterns over layers that are named after the models that have them: every attention layer as in transformers."""

import pytest
import torch
from conftest import PRESETS, build_gpt, pe_options
from hf_models import SIZES, hf_model, tokens

WINDOW, L = 9, 16
YARN = {"rope_type": "yarn", "original_max_position_embeddings": L, "factor": 8.0}
SCALED = {"train_scale": 8.0, "scale": 8.0, "original_len": L}
SMALL = dict(sliding_window=WINDOW, head_dim=8, num_experts_per_tok=1, num_local_experts=2, intermediate_size_mlp=8)
PLAIN, INTERLEAVED = {"rope_type": "default"}, {"layout": "interleaved"}
SINKS, ONE_HEAD = {"bias": "attention", "sinks": True}, {"num_attention_heads": 1, "head_dim": 32}
UNNORMED = {"attention_chunk_size": 64, "floor_scale": L, "use_qk_norm": False}
KINDS = {  # transformers' name, its rotations and what else it needs; our architecture, and options of the two parts
    "gemma3": ("gemma3_text", None, {"query_pre_attn_scalar": 8}, {"qk_norm": True}, {}, {}),
    "rnope_swa": ("cohere2", PLAIN | {"rope_theta": 10_000.0}, {}, {}, INTERLEAVED, {}),
    "llama4": ("llama4_text", PLAIN | {"rope_theta": 500_000.0}, UNNORMED, {}, INTERLEAVED | {"window": 64}, {}),
    "smollm3": ("smollm3", PLAIN | {"rope_theta": 50_000.0}, {}, {}, {}, {}),
    "gpt_oss": ("gpt_oss", YARN | {"rope_theta": 150_000.0, "truncate": False}, {}, SINKS, SCALED, SCALED),
    "olmo3": ("olmo3", {"full_attention": YARN | {"rope_theta": 500_000.0}}, ONE_HEAD, {"qk_norm": True}, {}, SCALED),
}


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_every_layer_attends_as_in_transformers(name):
    """Which have a window, frequencies, temperature, sinks; for what goes in and out of each in a network of theirs."""
    kind, rotations, theirs, cfg, *changes = KINDS[name]
    options = pe_options(name)
    pe = {part: options[part] | new for part, new in zip(dict.fromkeys(options["pattern"]), changes, strict=True)}
    for part in pe.values():
        part["window"] = part["window"] and max(WINDOW, changes[0].get("window", 0))
    n_layer, heads = len(options["pattern"]) + 1, theirs.get("num_attention_heads", 4)
    sizes = SIZES | SMALL | {"num_hidden_layers": n_layer, "num_key_value_heads": -(-heads // 2)} | theirs
    model, seen = hf_model(kind, **sizes, rope_parameters=rotations), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, args, kw, out: seen.append((kw, out[0])), with_kwargs=True)
    model(tokens(60))
    cfg = cfg | dict(n_layer=n_layer, n_head=heads, n_kv_head=-(-heads // 2), dim=32, norm_eps=1e-6)
    net, pos = build_gpt(name, pe=pe, train_len=L, **cfg), torch.arange(60)
    for i, (block, layer, (given, expected)) in enumerate(zip(net.blocks, model.model.layers, seen, strict=True)):
        weights = layer.self_attn.state_dict()
        for key in {key.rpartition(".")[2] for key in weights if "_proj" in key}:
            weights[f"qkv.{key}"] = torch.cat([weights.pop(f"{x}_proj.{key}") for x in "qkv"])
            weights[f"out.{key}"] = weights.pop(f"o_proj.{key}")
        if name == "gemma3":  # whose norms multiply by 1 + weight
            weights |= {key: value + 1 for key, value in weights.items() if "norm" in key}
        block.attn.load_state_dict(weights)
        encoding = net.encodings[i]
        out = block.attn(given["hidden_states"], encoding, encoding.context(pos, 60, 60), None, i)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert expected.std() > 0.1
