"""The architectures of transformers that our network can compute: names of settings and tensors, and what each allows.

Almost everything here is data. The defaults of `Architecture` are Llama's, so an entry shows what it does otherwise.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conf.schema import GPTConfig
from model.position import PositionEncoding
from model.position.absolute import Learned
from model.position.network import Encodings
from model.position.rotary import Rotary

# Settings of GPTConfig and their names in transformers.
SETTINGS = {
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
GPT2_SETTINGS = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "dim": "n_embd",
    "hidden_dim": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "mlp": "activation_function",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
# Activations of transformers and ours. The first name of each of ours is the one that an export writes.
GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
GELU = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_exact"}

# Our modules and theirs. All but `embedding`, `norm` and `head` are parts of a layer. Where one of our modules stands
# for several of theirs, its rows are the rows of theirs, one module after the other.
Modules = dict[str, tuple[str, ...]]
MODULES: Modules = {
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
    "attn_post_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
GPT2_MODULES: Modules = {
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

# The values that a setting may have. A setting without an entry is free.
Limits = dict[str, tuple[Any, ...]]
LIMITS: Limits = {
    "pe": ("rotary",),
    "pe.partial_rotary_factor": (1.0,),
    "pe.layout": ("half",),
    "pe.resonance": (False,),
    "pe.values": (False,),
    "model.norm": ("rmsnorm",),
    "model.norm_at": ("before",),
    "model.mlp": ("swiglu", "geglu"),
    "model.qk_norm": (False,),
    # No architecture here has what follows, whatever the value of another setting.
    "pe.temperature": ("none",),
    "model.sinks": (False,),
    "model.conv": (None,),
    "model.key_offset": (False,),
}
ATTENTION_BIAS: Limits = {"model.bias": (False, "attention")}
ANY_BIAS: Limits = {"model.bias": (False, True, "attention")}


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers. The defaults are those of Llama and its kin.

    Attributes:
        name: class of its language model.
        limits: the values that our settings may have.
        settings: settings of GPTConfig and their names in its configuration.
        activations: its activations and ours.
        modules: our modules and its own.
        layers: name of its list of layers.
        transposed: whether the matrices in its layers are [in, out].
        by_layer_type: whether layers with a window have rotary settings of their own.
        folded: whether it has constants that our weights must hold: see `_gemma3_folding`.
    """

    name: str
    limits: Limits
    settings: dict[str, str] = field(default_factory=lambda: SETTINGS)
    activations: dict[str, str] = field(default_factory=lambda: GATED)
    modules: Modules = field(default_factory=lambda: MODULES)
    layers: str = "model.layers"
    transposed: bool = False
    by_layer_type: bool = False
    folded: bool = False

    def parts(self, ours: str, theirs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return those of their tensors, which are by name, that make up the rows of our tensor, in order."""
        # Learned positions are the only parameters of an encoding that transformers has, in GPT-2.
        if ours.endswith(".table"):
            return [theirs["transformer.wpe.weight"]]
        # A name is that of a module and of its weight or bias, in a layer or not: blocks.3.attn.qkv.weight.
        match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(\w+)", ours)
        assert match
        layer, module, parameter = match.groups()
        prefix = "" if layer is None else f"{self.layers}.{layer}."
        return [theirs[f"{prefix}{name}.{parameter}"] for name in self.modules[module]]

    def read(self, ours: str, parts: list[Tensor], config: Any) -> Tensor:
        """Return our tensor, made of its `parts` in a model with this configuration."""
        # A single part is not copied: of a large model that would take as much memory again.
        value = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self._transposes(ours):
            value = value.T.contiguous()
        if self.folded:
            shift, factor = _gemma3_folding(config, ours)
            value = (value + shift) * factor
        return value

    def write(self, ours: str, value: Tensor, parts: list[Tensor], config: Any) -> None:
        """Fill the `parts` of our tensor in a model with this configuration from it: `read` backwards."""
        if self.folded:
            shift, factor = _gemma3_folding(config, ours)
            value = value / factor - shift
        if self._transposes(ours):
            value = value.T
        rows = [part.size(0) for part in parts]
        for part, piece in zip(parts, value.split(rows), strict=True):
            part.copy_(piece)

    def _transposes(self, ours: str) -> bool:
        in_layer = ".attn." in ours or ".mlp." in ours
        return self.transposed and in_layer and ours.endswith(".weight")

    def refused(self, cfg: GPTConfig, encodings: Encodings) -> list[str]:
        """Return the settings of a network that this architecture cannot have, each as "key=value"."""
        of_network: dict[str, list[Any]] = {
            "pe": list(map(_kind_of, encodings)),
            "number of windows": [len({pe.window for pe in encodings})],
            "model.dim % n_head": [cfg.dim % cfg.n_head],
            "model.n_head / n_kv_head": [cfg.n_head // cfg.kv_heads],  # 1: as many key heads as heads
            "model.n_head * head_dim / dim": [cfg.n_head * cfg.head_width / cfg.dim],  # 1: heads of the default width
        }
        for key, value in cfg:
            of_network[f"model.{key}"] = [value]
        refused = []
        for key, accepted in self.limits.items():
            if key.startswith("pe."):
                # An option may differ among layers. An encoding that has no such option counts as accepted.
                values = [getattr(pe, key.removeprefix("pe."), accepted[0]) for pe in encodings]
            else:
                values = of_network[key]
            refused += [f"{key}={value}" for value in values if value not in accepted]
        return list(dict.fromkeys(refused))  # each once, however many layers have it


def _gemma3_folding(config: Any, ours: str) -> tuple[float, float]:
    """Return (shift, factor) of Gemma 3: our tensor is factor * (theirs + shift).

    Its norms multiply by 1 + weight. It multiplies embeddings by sqrt(hidden_size): our embedding and head (which may
    be one matrix) hold the product, and our last norm divides by it again before the head. It multiplies scores by a
    constant other than 1 / sqrt(head_dim): our norm of the queries holds the quotient of the two.
    """
    shift = 1.0 if "norm" in ours else 0.0
    width = math.sqrt(config.hidden_size)
    if ours in ("embedding.weight", "head.weight"):
        return shift, width
    if ours == "norm.weight":
        return shift, 1 / width
    if "q_norm" in ours:
        return shift, math.sqrt(config.head_dim / config.query_pre_attn_scalar)
    return shift, 1.0


def _kind_of(pe: PositionEncoding) -> str:
    """Return what an encoding is for transformers: "rotary", "learned" or "none"; of any other the name of its class.

    Rotary is RoPE with some frequencies: whether transformers can have these is checked in `rope.check`.
    """
    # A subclass that overrides `frequencies` alone is still RoPE; any hook of its own, or of another base, which Rotary
    # calls by `super`, makes it something else.
    hooks = {"embed", "tables", "state", "rotate", "bias", "attend"}
    others = [cls for cls in type(pe).__mro__ if cls not in (Rotary, PositionEncoding)]
    if isinstance(pe, Rotary) and not any(hooks & vars(cls).keys() for cls in others):
        return "rotary"
    kinds = {Learned: "learned", PositionEncoding: "none"}
    return kinds.get(type(pe), type(pe).__name__)


GPT2_LIMITS: Limits = {
    "pe": ("learned",),
    "pe.window": (None,),
    "model.n_head / n_kv_head": (1,),
    "model.n_head * head_dim / dim": (1,),
}
LAYER_NORM: Limits = {"model.norm": ("layernorm",), "model.mlp": ("gelu", "gelu_exact")}
OLMO: Limits = LIMITS | ATTENTION_BIAS | {"model.norm_at": ("after",), "model.qk_norm": ("projection",)}

# By model_type. A network is written as the first architecture that can have all its settings.
ARCHITECTURES = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        LIMITS | LAYER_NORM | GPT2_LIMITS,
        settings=GPT2_SETTINGS,
        activations=GELU,
        modules=GPT2_MODULES,
        layers="transformer.h",
        transposed=True,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        LIMITS | LAYER_NORM,
        settings=SETTINGS | {"norm_eps": "norm_epsilon"},
        activations=GELU,
        modules=MODULES | {"mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",)},
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", LIMITS | ATTENTION_BIAS | {"model.qk_norm": (True,)}),
    "llama": Architecture("LlamaForCausalLM", LIMITS | ANY_BIAS | {"pe.window": (None,), "model.dim % n_head": (0,)}),
    "mistral": Architecture("MistralForCausalLM", LIMITS | {"model.bias": (False,), "number of windows": (1,)}),
    "qwen2": Architecture("Qwen2ForCausalLM", LIMITS | {"model.bias": ("qkv",)}),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM", LIMITS | ANY_BIAS | {"pe": ("rotary", "none"), "model.n_head * head_dim / dim": (1,)}
    ),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM",
        LIMITS | ATTENTION_BIAS | {"model.norm_at": ("both",), "model.qk_norm": (True,)},
        settings=SETTINGS | {"mlp": "hidden_activation"},
        # OLMo has a norm after each branch alone, Gemma 3 before it as well. Llama calls the one before the MLP
        # post_attention_layernorm, which in Gemma 3 is the one after attention.
        modules=MODULES | {"mlp_norm": ("pre_feedforward_layernorm",)},
        by_layer_type=True,
        folded=True,
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", OLMO | {"pe.window": (None,)}),
    "olmo3": Architecture("Olmo3ForCausalLM", OLMO, by_layer_type=True),
}
