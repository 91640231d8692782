"""Architectures of transformers that our network computes: the names of their settings and tensors, and the limits."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from model.gpt import GPTConfig
from model.position import PositionEncoding

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
_STARCODER2_SETTINGS = _SETTINGS | {"norm_eps": "norm_epsilon"}
_GPT2_SETTINGS = _SETTINGS | {"hidden_dim": "n_inner", "norm_eps": "layer_norm_epsilon", "mlp": "activation_function"}
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "silu": "swiglu"}
_LLAMA = {  # our modules: theirs, in a layer but for three, whose rows follow one another in ours
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.gate_proj mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_PHI3 = _LLAMA | {"attn.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"}
_STARCODER2 = _LLAMA | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_GPT2 = _STARCODER2 | {
    "embedding": "transformer.wte",
    "norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
}
Limits = dict[str, tuple[Any, ...]]  # setting: the values that it may have
_PLAIN: Limits = {"model.qk_norm": (False,), "model.sinks": (False,), "pe.temperature": ("none",)}
_GELU: Limits = _PLAIN | {"model.norm": ("layernorm",), "model.mlp": ("gelu", "gelu_exact")}
_SWIGLU: Limits = _PLAIN | {"model.norm": ("rmsnorm",), "model.mlp": ("swiglu",)}
_WHOLE_HEADS: Limits = {"pe.partial_rotary_factor": (1.0,)}
_NO_WINDOW: Limits = {"pe.window": (None,)}


class Architecture(NamedTuple):
    """An architecture of transformers."""

    name: str
    modules: dict[str, str]
    accepts: Limits  # all other settings are free
    settings: dict[str, str] = _SETTINGS
    layers: str = "model.layers"
    transposed: bool = False  # matrices of the layers are [in, out]

    def tensors(self, ours: str) -> list[str]:
        """Their tensors that make up the rows of our tensor, in order."""
        if ours.endswith(".table"):
            return ["transformer.wpe.weight"]
        match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(\w+)", ours)
        assert match
        prefix = f"{self.layers}.{match[1]}." if match[1] else ""
        return [f"{prefix}{module}.{match[3]}" for module in self.modules[match[2]].split()]

    def transposes(self, ours: str) -> bool:
        """Whether our tensor is the transpose of theirs."""
        return self.transposed and ours.endswith(".weight") and (".attn." in ours or ".mlp." in ours)

    def refused(self, cfg: GPTConfig, encodings: Iterable[PositionEncoding]) -> list[str]:
        """The settings that it cannot have."""
        values = {f"model.{key}": [value] for key, value in cfg}
        if cfg.kv_heads == cfg.n_head:
            values["model.n_kv_head"] = [None]
        for option, without in (("window", None), ("temperature", "none"), ("partial_rotary_factor", 1.0)):
            values[f"pe.{option}"] = [getattr(pe, option, without) for pe in encodings]
        return [f"{key}={value}" for key, good in self.accepts.items() for value in values[key] if value not in good]


_LLAMA_LIMITS = _SWIGLU | _WHOLE_HEADS | {"model.bias": (False, True, "attention")}
_QWEN3_LIMITS = _LLAMA_LIMITS | {"model.qk_norm": (True,), "model.bias": (False, "attention")}
_PHI3_LIMITS = _SWIGLU | {"model.bias": (False,), "model.head_dim": (None,)}
_GPT2_LIMITS = _GELU | _NO_WINDOW | {"model.n_kv_head": (None,), "model.head_dim": (None,)}
ARCHITECTURES = {  # by model_type
    "llama": Architecture("LlamaForCausalLM", _LLAMA, _LLAMA_LIMITS | _NO_WINDOW),
    "mistral": Architecture("MistralForCausalLM", _LLAMA, _LLAMA_LIMITS | {"model.bias": (False,)}),
    "qwen2": Architecture("Qwen2ForCausalLM", _LLAMA, _LLAMA_LIMITS | {"model.bias": ("qkv",)}),
    "qwen3": Architecture("Qwen3ForCausalLM", _LLAMA, _QWEN3_LIMITS),
    "smollm3": Architecture("SmolLM3ForCausalLM", _LLAMA, _LLAMA_LIMITS | _NO_WINDOW | {"model.head_dim": (None,)}),
    "phi3": Architecture("Phi3ForCausalLM", _PHI3, _PHI3_LIMITS),
    "starcoder2": Architecture("Starcoder2ForCausalLM", _STARCODER2, _GELU | _WHOLE_HEADS, _STARCODER2_SETTINGS),
    "gpt2": Architecture("GPT2LMHeadModel", _GPT2, _GPT2_LIMITS, _GPT2_SETTINGS, "transformer.h", transposed=True),
}
LACKING = {  # model_type: why its layers are not ours; the positions of each are a preset in conf/pe
    "cohere2": "attention and MLP side by side",
    "gemma3_text": "a norm after each branch",
    "gpt_oss": "a mixture of experts",
    "llama4_text": "a mixture of experts",
    "olmo3": "a norm after each branch",
}
