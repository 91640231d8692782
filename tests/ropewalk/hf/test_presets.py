"""Patterns over layers, named after models, that cannot be written: every attention layer as in transformers."""

import pytest
import torch
from conftest import build_gpt, pe_options
from hf_models import SIZES, hf_model, tokens

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


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_every_layer_attends_as_in_transformers(name):
    """Which have a window, frequencies, temperature, sinks; for what goes in and out of each in a network of theirs."""
    kind, rotation, theirs, cfg, *changes = KINDS[name]
    options = pe_options(name)
    window = max(WINDOW, changes[0].get("window", 0))
    pe = {}
    for part, change in zip(dict.fromkeys(options["pattern"]), changes, strict=True):
        pe[part] = options[part] | change
        if pe[part]["window"]:
            pe[part]["window"] = window
    n_layer = len(options["pattern"]) + 1
    sizes = SIZES | SMALL | {"num_hidden_layers": n_layer} | theirs
    model = hf_model(kind, **sizes, rope_parameters=rotation)
    inputs = []
    outputs = []

    def keep(module, positional, named, output):
        inputs.append(named["hidden_states"])
        outputs.append(output[0])

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(keep, with_kwargs=True)
    model(tokens(60))

    cfg = cfg | dict(n_layer=n_layer, n_head=4, n_kv_head=2, dim=32, norm_eps=1e-6)
    net = build_gpt(name, pe=pe, train_len=L, **cfg)
    for i, encoding in enumerate(net.encodings):
        attention = net.blocks[i].attn
        attention.load_state_dict(our_names(model.model.layers[i].self_attn.state_dict()))
        out = attention(inputs[i], encoding, make_context(encoding, torch.arange(60), 60, 60))
        torch.testing.assert_close(out, outputs[i], rtol=1e-4, atol=1e-4)
        assert outputs[i].std() > 0.1


def our_names(weights):
    """Weights of an attention layer of transformers under our names."""
    renamed = {name: tensor for name, tensor in weights.items() if "_proj" not in name}
    for kind in ("weight", "bias"):
        if f"q_proj.{kind}" in weights:
            renamed[f"qkv.{kind}"] = torch.cat([weights[f"{x}_proj.{kind}"] for x in "qkv"])
            renamed[f"out.{kind}"] = weights[f"o_proj.{kind}"]
    return renamed
