"""The architectures of transformers that our network can compute: the names of their settings and tensors, and the
values that our settings may have in them.

Almost everything here is data, one plain literal for each architecture. Architectures that differ in one line only are
written out in full all the same.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from conf.schema import GPTConfig
from model.position import PositionEncoding
from model.position.absolute import Learned

# Settings of GPTConfig and their names in transformers.
_SETTINGS = {
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
_STARCODER2_SETTINGS = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "dim": "hidden_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "norm_epsilon",
    "mlp": "hidden_act",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
_GPT2_SETTINGS = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "dim": "hidden_size",
    "head_dim": "head_dim",
    "hidden_dim": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "mlp": "activation_function",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
_GEMMA3_SETTINGS = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "dim": "hidden_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "mlp": "hidden_activation",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}

# Activations of transformers and ours. The first name of each of ours is the one that an export writes.
_GATED_ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
_GELU_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_exact"}

# Our modules and theirs. All but `embedding`, `norm` and `head` are parts of a layer. Where one of our modules stands
# for several of theirs, its rows are the rows of theirs, one module after the other.
Modules = dict[str, tuple[str, ...]]
_LLAMA_MODULES: Modules = {
    "embedding": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "attn_norm": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
_STARCODER2_MODULES: Modules = {
    "embedding": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "attn_norm": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
}
_GPT2_MODULES: Modules = {
    "embedding": ("transformer.wte",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
    "attn_norm": ("ln_1",),
    "attn.qkv": ("attn.c_attn",),
    "attn.out": ("attn.c_proj",),
    "mlp_norm": ("ln_2",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
}
_OLMO_MODULES: Modules = {
    "embedding": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.out": ("self_attn.o_proj",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "attn_post_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
_GEMMA3_MODULES: Modules = {
    "embedding": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "attn_norm": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.out": ("self_attn.o_proj",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "attn_post_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}

Limits = dict[str, tuple[Any, ...]]  # the values that a setting may have


def _no_folding(config: Any, name: str) -> tuple[float, float]:
    return 0.0, 1.0


def _gemma3_folding(config: Any, name: str) -> tuple[float, float]:
    """Return (shift, factor) that fold the constants of Gemma 3 into our tensor `name`.

    Its norms multiply by 1 + weight. It multiplies embeddings by sqrt(hidden_size): our embedding and head (which may
    be one matrix) hold the product, and our last norm divides by it again before the head. It multiplies scores by a
    constant other than 1 / sqrt(head_dim): our norm of the queries holds the quotient of the two.
    """
    shift = 1.0 if "norm" in name else 0.0
    width = math.sqrt(config.hidden_size)
    if name in ("embedding.weight", "head.weight"):
        return shift, width
    if name == "norm.weight":
        return shift, 1 / width
    if "q_norm" in name:
        return shift, math.sqrt(config.head_dim / config.query_pre_attn_scalar)
    return shift, 1.0


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers.

    Attributes:
        name: class of its language model.
        modules: our modules and its own.
        accepts: our settings that it limits, and the values that each may have; all other settings are free.
        settings: settings of GPTConfig and their names in its configuration.
        activations: its activations and ours.
        layers: name of its list of layers.
        transposed: whether the matrices in its layers are [in, out].
        rotates_by_kind: whether layers with a window have rotary settings of their own.
        folding: returns (shift, factor) for the name of a tensor: our tensor is factor * (theirs + shift).
    """

    name: str
    modules: Modules
    accepts: Limits
    settings: dict[str, str]
    activations: dict[str, str]
    layers: str = "model.layers"
    transposed: bool = False
    rotates_by_kind: bool = False
    folding: Callable[[Any, str], tuple[float, float]] = _no_folding

    def tensors(self, name: str) -> list[str]:
        """Return their tensors that make up the rows of our tensor, in order."""
        # Learned positions are the only parameters of an encoding that transformers has, in GPT-2.
        if name.endswith(".table"):
            return ["transformer.wpe.weight"]
        # A name is that of a module and of its weight or bias, in a layer or not: blocks.3.attn.qkv.weight.
        match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(\w+)", name)
        assert match
        layer, module, parameter = match.groups()
        prefix = "" if layer is None else f"{self.layers}.{layer}."
        return [f"{prefix}{theirs}.{parameter}" for theirs in self.modules[module]]

    def transposes(self, name: str) -> bool:
        """Return whether our tensor is the transpose of theirs."""
        in_layer = ".attn." in name or ".mlp." in name
        return self.transposed and in_layer and name.endswith(".weight")

    def refused(self, cfg: GPTConfig, encodings: Iterable[PositionEncoding]) -> list[str]:
        """Return the settings of a network that this architecture cannot have, each as "key=value"."""
        values = _values(cfg, list(encodings))
        refused = []
        for key, accepted in (self.accepts | OURS_ALONE).items():
            refused += [f"{key}={value}" for value in values[key] if value not in accepted]
        return refused


def _values(cfg: GPTConfig, encodings: list[PositionEncoding]) -> dict[str, list[Any]]:
    """Return the distinct values of every setting that a limit may name; an option of `pe` may differ among layers."""
    values: dict[str, list[Any]] = {f"model.{key}": [value] for key, value in cfg}
    # As many key heads as heads are the default, written out.
    if cfg.kv_heads == cfg.n_head:
        values["model.n_kv_head"] = [None]
    values["model.dim % n_head"] = [cfg.dim % cfg.n_head]
    # Any other class counts as rotary here: whether transformers can rotate as it does is checked in `rope.write`.
    kinds: dict[type, str] = {Learned: "learned", PositionEncoding: "none"}
    values["pe"] = _distinct(kinds.get(type(pe), "rotary") for pe in encodings)
    values["pe.window"] = _distinct(pe.window for pe in encodings)
    values["pe.temperature"] = _distinct(pe.temperature for pe in encodings)
    values["pe.partial_rotary_factor"] = _distinct(getattr(pe, "partial_rotary_factor", 1.0) for pe in encodings)
    values["number of windows"] = [len(values["pe.window"])]
    return values


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


# Settings that no architecture of transformers has, and their only values there.
OURS_ALONE: Limits = {"model.conv": (None,), "model.key_offset": (False,)}

# By model_type. A network is written as the first architecture that can have all its settings.
ARCHITECTURES = {
    "gpt2": Architecture(
        name="GPT2LMHeadModel",
        modules=_GPT2_MODULES,
        settings=_GPT2_SETTINGS,
        activations=_GELU_ACTIVATIONS,
        layers="transformer.h",
        transposed=True,
        accepts={
            "model.norm_at": ("before",),
            "model.qk_norm": (False,),
            "model.sinks": (False,),
            "pe": ("learned",),
            "pe.temperature": ("none",),
            "model.norm": ("layernorm",),
            "model.mlp": ("gelu", "gelu_exact"),
            "pe.window": (None,),
            "model.n_kv_head": (None,),
            "model.head_dim": (None,),
        },
    ),
    "starcoder2": Architecture(
        name="Starcoder2ForCausalLM",
        modules=_STARCODER2_MODULES,
        settings=_STARCODER2_SETTINGS,
        activations=_GELU_ACTIVATIONS,
        accepts={
            "model.norm_at": ("before",),
            "model.qk_norm": (False,),
            "model.sinks": (False,),
            "pe": ("rotary",),
            "pe.temperature": ("none",),
            "model.norm": ("layernorm",),
            "model.mlp": ("gelu", "gelu_exact"),
            "pe.partial_rotary_factor": (1.0,),
        },
    ),
    "qwen3": Architecture(
        name="Qwen3ForCausalLM",
        modules=_LLAMA_MODULES,
        settings=_SETTINGS,
        activations=_GATED_ACTIVATIONS,
        accepts={
            "model.norm_at": ("before",),
            "model.qk_norm": (True,),
            "model.sinks": (False,),
            "pe": ("rotary",),
            "pe.temperature": ("none",),
            "model.norm": ("rmsnorm",),
            "model.mlp": ("swiglu", "geglu"),
            "pe.partial_rotary_factor": (1.0,),
            "model.bias": (False, "attention"),
        },
    ),
    "llama": Architecture(
        name="LlamaForCausalLM",
        modules=_LLAMA_MODULES,
        settings=_SETTINGS,
        activations=_GATED_ACTIVATIONS,
        accepts={
            "model.norm_at": ("before",),
            "model.qk_norm": (False,),
            "model.sinks": (False,),
            "pe": ("rotary",),
            "pe.temperature": ("none",),
            "model.norm": ("rmsnorm",),
            "model.mlp": ("swiglu", "geglu"),
            "pe.partial_rotary_factor": (1.0,),
            "model.bias": (False, True, "attention"),
            "pe.window": (None,),
            "model.dim % n_head": (0,),
        },
    ),
    "mistral": Architecture(
        name="MistralForCausalLM",
        modules=_LLAMA_MODULES,
        settings=_SETTINGS,
        activations=_GATED_ACTIVATIONS,
        accepts={
            "model.norm_at": ("before",),
            "model.qk_norm": (False,),
            "model.sinks": (False,),
            "pe": ("rotary",),
            "pe.temperature": ("none",),
            "model.norm": ("rmsnorm",),
            "model.mlp": ("swiglu", "geglu"),
            "pe.partial_rotary_factor": (1.0,),
            "model.bias": (False,),
            "number of windows": (1,),
        },
    ),
    "qwen2": Architecture(
        name="Qwen2ForCausalLM",
        modules=_LLAMA_MODULES,
        settings=_SETTINGS,
        activations=_GATED_ACTIVATIONS,
        accepts={
            "model.norm_at": ("before",),
            "model.qk_norm": (False,),
            "model.sinks": (False,),
            "pe": ("rotary",),
            "pe.temperature": ("none",),
            "model.norm": ("rmsnorm",),
            "model.mlp": ("swiglu", "geglu"),
            "pe.partial_rotary_factor": (1.0,),
            "model.bias": ("qkv",),
        },
    ),
    "smollm3": Architecture(
        name="SmolLM3ForCausalLM",
        modules=_LLAMA_MODULES,
        settings=_SETTINGS,
        activations=_GATED_ACTIVATIONS,
        accepts={
            "model.norm_at": ("before",),
            "model.qk_norm": (False,),
            "model.sinks": (False,),
            "pe": ("rotary", "none"),
            "pe.temperature": ("none",),
            "model.norm": ("rmsnorm",),
            "model.mlp": ("swiglu", "geglu"),
            "pe.partial_rotary_factor": (1.0,),
            "model.bias": (False, True, "attention"),
            "model.head_dim": (None,),
        },
    ),
    "gemma3_text": Architecture(
        name="Gemma3ForCausalLM",
        modules=_GEMMA3_MODULES,
        settings=_GEMMA3_SETTINGS,
        rotates_by_kind=True,
        folding=_gemma3_folding,
        activations=_GATED_ACTIVATIONS,
        accepts={
            "model.norm_at": ("both",),
            "model.qk_norm": (True,),
            "model.sinks": (False,),
            "pe": ("rotary",),
            "pe.temperature": ("none",),
            "model.norm": ("rmsnorm",),
            "model.mlp": ("swiglu", "geglu"),
            "pe.partial_rotary_factor": (1.0,),
            "model.bias": (False, "attention"),
        },
    ),
    "olmo2": Architecture(
        name="Olmo2ForCausalLM",
        modules=_OLMO_MODULES,
        settings=_SETTINGS,
        activations=_GATED_ACTIVATIONS,
        accepts={
            "model.norm_at": ("after",),
            "model.qk_norm": ("projection",),
            "model.sinks": (False,),
            "pe": ("rotary",),
            "pe.temperature": ("none",),
            "model.norm": ("rmsnorm",),
            "model.mlp": ("swiglu", "geglu"),
            "pe.partial_rotary_factor": (1.0,),
            "model.bias": (False, "attention"),
            "pe.window": (None,),
        },
    ),
    "olmo3": Architecture(
        name="Olmo3ForCausalLM",
        modules=_OLMO_MODULES,
        rotates_by_kind=True,
        settings=_SETTINGS,
        activations=_GATED_ACTIVATIONS,
        accepts={
            "model.norm_at": ("after",),
            "model.qk_norm": ("projection",),
            "model.sinks": (False,),
            "pe": ("rotary",),
            "pe.temperature": ("none",),
            "model.norm": ("rmsnorm",),
            "model.mlp": ("swiglu", "geglu"),
            "pe.partial_rotary_factor": (1.0,),
            "model.bias": (False, "attention"),
        },
    ),
}
MIXTURES_OF_EXPERTS = ("gpt_oss", "llama4_text")  # not read; their positions are presets in conf/pe
