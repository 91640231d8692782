"""Architectures of transformers that our network computes: the names of their settings and tensors, and the limits."""

import re
from typing import Any, NamedTuple

from model.gpt import GPTConfig

_SETTINGS = {  # of GPTConfig: what transformers calls them
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "dim": "hidden_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "mlp": "hidden_act",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
_GPT2_SETTINGS = {key: _SETTINGS[key] for key in ("n_layer", "n_head", "dim", "init_std", "tie_embeddings")} | {
    "hidden_dim": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "mlp": "activation_function",
}
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "silu": "swiglu"}
_LLAMA = {  # our modules: theirs, whose rows follow one another in ours
    "embedding": ["model.embed_tokens"],
    "norm": ["model.norm"],
    "head": ["lm_head"],
    "attn_norm": ["model.layers.{}.input_layernorm"],
    "attn.qkv": [f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"],
    "attn.q_norm": ["model.layers.{}.self_attn.q_norm"],
    "attn.k_norm": ["model.layers.{}.self_attn.k_norm"],
    "attn.out": ["model.layers.{}.self_attn.o_proj"],
    "mlp_norm": ["model.layers.{}.post_attention_layernorm"],
    "mlp.up": ["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"],
    "mlp.down": ["model.layers.{}.mlp.down_proj"],
}
_PHI3 = {"attn.qkv": ["model.layers.{}.self_attn.qkv_proj"], "mlp.up": ["model.layers.{}.mlp.gate_up_proj"]}
_STARCODER2 = {"mlp.up": ["model.layers.{}.mlp.c_fc"], "mlp.down": ["model.layers.{}.mlp.c_proj"]}
_GPT2 = {
    "embedding": ["transformer.wte"],
    "norm": ["transformer.ln_f"],
    "head": ["lm_head"],
    "attn_norm": ["transformer.h.{}.ln_1"],
    "attn.qkv": ["transformer.h.{}.attn.c_attn"],
    "attn.out": ["transformer.h.{}.attn.c_proj"],
    "mlp_norm": ["transformer.h.{}.ln_2"],
    "mlp.up": ["transformer.h.{}.mlp.c_fc"],
    "mlp.down": ["transformer.h.{}.mlp.c_proj"],
}
_GELU: dict[str, tuple[Any, ...]] = {"norm": ("layernorm",), "mlp": ("gelu", "gelu_exact"), "qk_norm": (False,)}
_SWIGLU: dict[str, tuple[Any, ...]] = {"norm": ("rmsnorm",), "mlp": ("swiglu",), "qk_norm": (False,)}


class Architecture(NamedTuple):
    """What transformers calls the parts of an architecture, and which of our networks it computes."""

    name: str
    modules: dict[str, list[str]]
    accepts: dict[str, tuple[Any, ...]]  # settings of GPTConfig that are not free
    settings: dict[str, str] = _SETTINGS
    window: bool = True  # may have a sliding window
    partial: bool = False  # may rotate a part of each head's channels
    divided: bool = False  # n_head must divide dim
    transposed: bool = False  # matrices of the blocks are [in, out]

    def tensors(self, ours: str) -> list[str]:
        """Their tensors that make up the rows of our tensor, in order."""
        match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(\w+)", ours)
        assert match
        if match[3] == "table":
            return ["transformer.wpe.weight"]
        return [f"{module.format(match[1])}.{match[3]}" for module in self.modules[match[2]]]

    def transposes(self, ours: str) -> bool:
        """Whether our tensor is the transpose of theirs."""
        return self.transposed and ours.endswith(".weight") and (".attn." in ours or ".mlp." in ours)

    def refused(self, cfg: GPTConfig) -> list[str]:
        """The settings of `cfg` that it cannot have."""
        wrong = [key for key, good in self.accepts.items() if getattr(cfg, key) not in good]
        if "n_kv_head" not in self.settings and cfg.kv_heads != cfg.n_head:
            wrong.append("n_kv_head")
        if self.divided and cfg.dim % cfg.n_head:
            wrong.append("n_head")
        return [f"model.{key}={getattr(cfg, key)}" for key in wrong]


ARCHITECTURES = {  # by model_type
    "llama": Architecture(
        "LlamaForCausalLM", _LLAMA, _SWIGLU | {"bias": (False, True, "attention")}, window=False, divided=True
    ),
    "mistral": Architecture("MistralForCausalLM", _LLAMA, _SWIGLU | {"bias": (False,)}),
    "qwen2": Architecture("Qwen2ForCausalLM", _LLAMA, _SWIGLU | {"bias": ("qkv",)}),
    "qwen3": Architecture("Qwen3ForCausalLM", _LLAMA, _SWIGLU | {"qk_norm": (True,), "bias": (False, "attention")}),
    "phi3": Architecture(
        "Phi3ForCausalLM", _LLAMA | _PHI3, _SWIGLU | {"bias": (False,), "head_dim": (None,)}, partial=True
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", _LLAMA | _STARCODER2, _GELU, _SETTINGS | {"norm_eps": "norm_epsilon"}
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel", _GPT2, _GELU | {"head_dim": (None,)}, _GPT2_SETTINGS, window=False, transposed=True
    ),
}
