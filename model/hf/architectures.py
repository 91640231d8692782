"""Architectures of transformers that our network computes: the names of their settings and tensors, and the limits."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from conf.schema import GPTConfig
from model.position import PositionEncoding
from model.position.absolute import Learned

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
_GPT2_SETTINGS = _SETTINGS | {"hidden_dim": "n_inner", "norm_eps": "layer_norm_epsilon", "mlp": "activation_function"}
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_exact"}
_GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
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
_AFTER = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_OLMO = _LLAMA | _AFTER
_GEMMA = _LLAMA | _AFTER | {"mlp_norm": "pre_feedforward_layernorm"}
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
_PLAIN: Limits = {"model.norm_at": ("before",), "model.parallel": (False,), "model.qk_norm": (False,)}
_PLAIN |= {"model.sinks": (False,), "pe": ("rotary",), "pe.temperature": ("none",)}
_GELU: Limits = _PLAIN | {"model.norm": ("layernorm",), "model.mlp": ("gelu", "gelu_exact")}
_GLU: Limits = _PLAIN | {"model.norm": ("rmsnorm",), "model.mlp": ("swiglu", "geglu")}
_WHOLE_HEADS: Limits = {"pe.partial_rotary_factor": (1.0,)}
_NO_WINDOW: Limits = {"pe.window": (None,)}
_NOPE: Limits = {"pe": ("rotary", "none")}


def _gemma(config: Any, ours: str) -> tuple[float, float]:
    """Norms multiply by 1 + weight; embeddings are multiplied by sqrt(dim), which our last norm takes back; scores by a
    constant, which is in our norm of queries."""
    width, sharpened = math.sqrt(config.hidden_size), math.sqrt(config.head_dim / config.query_pre_attn_scalar)
    factors = {"embedding.weight": width, "head.weight": width, "norm.weight": 1 / width}
    return float("norm" in ours), factors.get(ours, sharpened if "q_norm" in ours else 1.0)


class Architecture(NamedTuple):
    """An architecture of transformers."""

    name: str
    modules: dict[str, str]
    accepts: Limits  # all other settings are free
    settings: dict[str, str] = _SETTINGS
    layers: str = "model.layers"
    transposed: bool = False  # matrices of the layers are [in, out]
    rotates_by_kind: bool = False  # layers with a window by other settings than those without
    activations: dict[str, str] = _GATED  # theirs: ours
    folded: Callable[[Any, str], tuple[float, float]] = lambda config, ours: (0.0, 1.0)  # a, b: ours is b (theirs + a)

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
        values["model.dim % n_head"] = [cfg.dim % cfg.n_head]
        kinds: dict[type, str] = {Learned: "learned", PositionEncoding: "none"}
        values["pe"] = [*{kinds.get(type(pe), "rotary") for pe in encodings}]
        for option, without in (("window", None), ("temperature", "none"), ("partial_rotary_factor", 1.0)):
            values[f"pe.{option}"] = [*{getattr(pe, option, without) for pe in encodings}]
        values["number of windows"] = [len(values["pe.window"])]
        return [f"{key}={value}" for key, good in self.accepts.items() for value in values[key] if value not in good]


_ATTN_BIAS: Limits = {"model.bias": (False, "attention")}
_LLAMA_LIMITS = _GLU | _WHOLE_HEADS | {"model.bias": (False, True, "attention")}
_MISTRAL_LIMITS: Limits = {"model.bias": (False,), "number of windows": (1,)}
_SMOLLM3_LIMITS: Limits = _NOPE | {"model.head_dim": (None,)}
_QWEN3_LIMITS = _LLAMA_LIMITS | _ATTN_BIAS | {"model.qk_norm": (True,)}
_GPT2_LIMITS = _GELU | _NO_WINDOW | {"pe": ("learned",), "model.n_kv_head": (None,), "model.head_dim": (None,)}
_GEMMA_LIMITS = _QWEN3_LIMITS | {"model.norm_at": ("both",)}
_OLMO_LIMITS = _QWEN3_LIMITS | {"model.norm_at": ("after",), "model.qk_norm": ("projection",)}
_GEMMA3_REST: dict[str, Any] = {"settings": _SETTINGS | {"mlp": "hidden_activation"}, "rotates_by_kind": True}
_STARCODER2_REST: dict[str, Any] = {"settings": _SETTINGS | {"norm_eps": "norm_epsilon"}, "activations": _ACTIVATIONS}
_GPT2_REST: dict[str, Any] = {"settings": _GPT2_SETTINGS, "activations": _ACTIVATIONS, "layers": "transformer.h"}
ARCHITECTURES = {  # by model_type; a network is written as the one that refuses least, of several the first
    "gpt2": Architecture("GPT2LMHeadModel", _GPT2, _GPT2_LIMITS, **_GPT2_REST, transposed=True),
    "starcoder2": Architecture("Starcoder2ForCausalLM", _STARCODER2, _GELU | _WHOLE_HEADS, **_STARCODER2_REST),
    "qwen3": Architecture("Qwen3ForCausalLM", _LLAMA, _QWEN3_LIMITS),
    "llama": Architecture("LlamaForCausalLM", _LLAMA, _LLAMA_LIMITS | _NO_WINDOW | {"model.dim % n_head": (0,)}),
    "mistral": Architecture("MistralForCausalLM", _LLAMA, _LLAMA_LIMITS | _MISTRAL_LIMITS),
    "qwen2": Architecture("Qwen2ForCausalLM", _LLAMA, _LLAMA_LIMITS | {"model.bias": ("qkv",)}),
    "smollm3": Architecture("SmolLM3ForCausalLM", _LLAMA, _LLAMA_LIMITS | _SMOLLM3_LIMITS),
    "gemma3_text": Architecture("Gemma3ForCausalLM", _GEMMA, _GEMMA_LIMITS, **_GEMMA3_REST, folded=_gemma),
    "olmo2": Architecture("Olmo2ForCausalLM", _OLMO, _OLMO_LIMITS | _NO_WINDOW),
    "olmo3": Architecture("Olmo3ForCausalLM", _OLMO, _OLMO_LIMITS, rotates_by_kind=True),
}
MIXTURES_OF_EXPERTS = ("gpt_oss", "llama4_text")  # whose positions are presets in conf/pe
