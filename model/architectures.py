"""Architectures of transformers that our network computes: their config.json and the names of their tensors."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from model import rope_parameters
from model.gpt import GPT, GPTConfig, parse_config
from model.position import PositionEncoding
from model.position.absolute import Learned
from model.position.rotary import Rotary

_GPT2 = {
    "embedding": ["wte"],
    "positions.0": ["wpe"],
    "norm": ["ln_f"],
    "head": ["lm_head"],
    "attn_norm": ["h.{}.ln_1"],
    "attn.qkv": ["h.{}.attn.c_attn"],
    "attn.out": ["h.{}.attn.c_proj"],
    "mlp_norm": ["h.{}.ln_2"],
    "mlp.up": ["h.{}.mlp.c_fc"],
    "mlp.down": ["h.{}.mlp.c_proj"],
}
_LLAMA = {
    "embedding": ["embed_tokens"],
    "norm": ["norm"],
    "head": ["lm_head"],
    "attn_norm": ["layers.{}.input_layernorm"],
    "attn.qkv": [f"layers.{{}}.self_attn.{x}_proj" for x in "qkv"],
    "attn.q_norm": ["layers.{}.self_attn.q_norm"],
    "attn.k_norm": ["layers.{}.self_attn.k_norm"],
    "attn.out": ["layers.{}.self_attn.o_proj"],
    "mlp_norm": ["layers.{}.post_attention_layernorm"],
    "mlp.up": ["layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"],
    "mlp.down": ["layers.{}.mlp.down_proj"],
}
_PHI3 = _LLAMA | {"attn.qkv": ["layers.{}.self_attn.qkv_proj"], "mlp.up": ["layers.{}.mlp.gate_up_proj"]}
_STARCODER2 = _LLAMA | {"mlp.up": ["layers.{}.mlp.c_fc"], "mlp.down": ["layers.{}.mlp.c_proj"]}
_GPT2_SIZES = {"n_layer": "n_layer", "n_head": "n_head", "dim": "n_embd"}
_SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
}
_GELU: dict[str, tuple[Any, ...]] = {"norm": ("layernorm",), "mlp": ("gelu", "gelu_exact"), "qk_norm": (False,)}
_SWIGLU: dict[str, tuple[Any, ...]] = {"norm": ("rmsnorm",), "mlp": ("swiglu",), "qk_norm": (False,)}
_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "silu": "swiglu"}
_NEUTRAL = {  # settings that change the function, and the value that does not
    "quantization_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_EXPORTABLE = (
    "exported are pe=learned with model.norm=layernorm and model.mlp=gelu (to GPT-2), rotary encodings with these two "
    "(to Starcoder2), and rotary encodings with model.norm=rmsnorm and model.mlp=swiglu (to Llama; with model.bias=qkv "
    "to Qwen2, with model.qk_norm=true to Qwen3, with pe=rope and pe.fraction to Phi-3)"
)


class Architecture(NamedTuple):
    """What transformers calls an architecture and its parts, and which of our networks it computes."""

    name: str
    modules: dict[str, list[str]]  # ours: theirs, whose rows follow one another in ours; {} is the layer
    accepts: dict[str, tuple[Any, ...]]  # fields of GPTConfig: their values, as far as they are not free
    sizes: dict[str, str] = _SIZES
    prefix: str = "model."  # of all modules but the head
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    tied: bool = False  # where config.json does not say
    all_biased: bool = False  # every linear layer and norm has a bias; zero does what none does
    transposed: bool = False  # matrices of the blocks are [in, out]
    rope_types: Mapping[str, str] = rope_parameters.ROPE_TYPES
    partial: bool = False  # may turn a part of each head's channels

    def turns(self, ours: str) -> bool:
        """Whether the tensor `ours` is the transpose of theirs."""
        return self.transposed and ours.endswith(".weight") and (".attn." in ours or ".mlp." in ours)

    def parts(self, net: GPT) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """For each tensor of `net`, theirs that make it up, in order: (name without prefix, shape)."""
        cfg, parts = net.cfg, {}
        for ours, value in net.state_dict().items():
            if ours == "head.weight" and cfg.tie_embeddings:
                continue
            module, _, leaf = ours.rpartition(".")
            block = re.fullmatch(r"blocks\.(\d+)\.(.*)", module)
            layer, module = (block[1], block[2]) if block else ("", module)
            names = [f"{name.format(layer)}.{leaf.replace('table', 'weight')}" for name in self.modules[module]]
            if len(names) == 3:
                rows = [heads * cfg.head_width for heads in (cfg.n_head, cfg.kv_heads, cfg.kv_heads)]
            else:
                rows = [len(value) // len(names)] * len(names)
            shapes = [(n, *value.shape[1:]) for n in rows]
            parts[ours] = list(zip(names, [s[::-1] for s in shapes] if self.turns(ours) else shapes, strict=True))
        return parts


ARCHITECTURES = {  # by model_type
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _GPT2,
        _GELU | {"head_dim": (None,)},
        sizes=_GPT2_SIZES | {"hidden_dim": "n_inner"},
        prefix="transformer.",
        eps="layer_norm_epsilon",
        activation="activation_function",
        tied=True,
        all_biased=True,
        transposed=True,
    ),
    "llama": Architecture("LlamaForCausalLM", _LLAMA, _SWIGLU | {"bias": (False, True, "attention")}),
    "mistral": Architecture("MistralForCausalLM", _LLAMA, _SWIGLU | {"bias": (False,)}),
    "qwen2": Architecture("Qwen2ForCausalLM", _LLAMA, _SWIGLU | {"bias": ("qkv",)}),
    "qwen3": Architecture("Qwen3ForCausalLM", _LLAMA, _SWIGLU | {"qk_norm": (True,), "bias": (False, "attention")}),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _PHI3,
        _SWIGLU | {"bias": (False,), "head_dim": (None,)},
        rope_types={"default": "default", "longrope": "longrope", "su": "longrope"},
        partial=True,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", _STARCODER2, _GELU, eps="norm_epsilon", tied=True, all_biased=True
    ),
}


def read_config(config: Mapping[str, Any]) -> tuple[GPTConfig, dict[str, Any], int, int]:
    """(architecture, `pe` options, vocab_size, train_len) by a config.json with a model_type of `ARCHITECTURES`.

    Dropout is a choice of the training, and is not taken over.

    Raises:
        ValueError: names a setting that is missing, or that our network cannot honour.
    """
    kind = config["model_type"]
    arch = ARCHITECTURES[kind]
    for key, neutral in _NEUTRAL.items():
        if config.get(key, neutral) != neutral:
            raise ValueError(f"{key}={config[key]!r} cannot be honoured, only {neutral!r} can")
    vocab_size = _count(config, "vocab_size")
    train_len = _count(config, "n_positions" if kind == "gpt2" else "max_position_embeddings")
    # Without a word on it, a Mistral has a window, a Qwen has none in spite of one.
    window = config.get("sliding_window", 4096 if kind == "mistral" else None)
    windowed = config.get("use_sliding_window", not kind.startswith("qwen")) and window and window < train_len
    if windowed or "sliding_attention" in (config.get("layer_types") or []):
        raise ValueError(
            f"sliding_window={window} hides part of max_position_embeddings={train_len} tokens, which cannot be "
            f"honoured; sliding_window=null, without layer_types, reads the weights with full attention"
        )
    activation = _needed(config, arch.activation)
    if _ACTIVATIONS.get(activation) not in arch.accepts["mlp"]:
        known = [theirs for theirs, ours in _ACTIVATIONS.items() if ours in arch.accepts["mlp"]]
        raise ValueError(f"{arch.activation}={activation!r} cannot be honoured; these can: {', '.join(known)}")
    sizes: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in arch.sizes.items()}
    if kind == "gpt2" and sizes["hidden_dim"] is None:
        sizes["hidden_dim"] = 4 * _count(config, "n_embd")
    elif kind in ("llama", "phi3") and sizes["n_kv_head"] is None:
        sizes["n_kv_head"] = sizes["n_head"]
    for ours, theirs in arch.sizes.items():
        _count({theirs: sizes[ours]}, theirs)
    head_dim = config.get("head_dim") or (128 if kind == "qwen3" else None)
    if head_dim and head_dim * sizes["n_head"] == sizes["dim"]:
        head_dim = None
    settings = sizes | {
        "head_dim": head_dim,
        "norm": arch.accepts["norm"][0],
        "norm_eps": _needed(config, arch.eps),
        "mlp": _ACTIVATIONS[activation],
        "bias": _read_bias(config, kind),
        "qk_norm": arch.accepts["qk_norm"][0],
        "tie_embeddings": config.get("tie_word_embeddings", arch.tied),
        "init_std": config.get("initializer_range", 0.02),
    }
    cfg = parse_config(settings)
    if kind == "gpt2":
        learned = {"name": "learned", "_target_": f"{Learned.__module__}.{Learned.__name__}"}
        pe = learned | {"scale": 1.0, "train_scale": 1.0, "original_len": train_len}
    else:
        if kind == "phi3":
            config = {"original_max_position_embeddings": 4096, **config}  # its default
        pe = rope_parameters.read(config, cfg.shape(train_len), rope_types=arch.rope_types, partial=arch.partial)
    return cfg, pe, vocab_size, train_len


def _needed(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"{key} is missing")
    return config[key]


def _count(config: Mapping[str, Any], key: str) -> int:
    value = _needed(config, key)
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"{key}={value!r} must be a positive integer")
    return value


def _read_bias(config: Mapping[str, Any], kind: str) -> bool | str:
    """`bias` of `GPTConfig`."""
    if kind in ("gpt2", "starcoder2"):
        if not config.get("use_bias", True):
            raise ValueError("use_bias=false leaves its bias to LayerNorm alone, which cannot be honoured")
        return True
    if kind in ("mistral", "phi3", "qwen2"):
        return kind == "qwen2" and "qkv"
    attention, mlp = config.get("attention_bias", False), kind == "llama" and config.get("mlp_bias", False)
    if mlp and not attention:
        raise ValueError("mlp_bias=true without attention_bias cannot be honoured")
    return bool(mlp) or (bool(attention) and "attention")


def write_config(net: GPT) -> dict[str, Any]:
    """The config.json of the architecture that computes what `net` computes, without names of special tokens.

    Raises:
        ValueError: transformers has none; names what stands in the way, and what can be exported.
    """
    cfg, pe = net.cfg, net.encodings[0]
    if type(pe) is not Learned and not isinstance(pe, Rotary):
        raise ValueError(f"the encoding {type(pe).__name__} cannot be exported; {_EXPORTABLE}")
    kind = _kind(cfg, pe)
    arch = ARCHITECTURES[kind]
    wrong = [f"model.{key}={getattr(cfg, key)}" for key, good in arch.accepts.items() if getattr(cfg, key) not in good]
    if kind == "gpt2" and cfg.kv_heads != cfg.n_head:
        wrong.append(f"model.n_kv_head={cfg.n_kv_head}")
    if kind == "llama" and cfg.dim % cfg.n_head:
        wrong.append(f"model.n_head={cfg.n_head}, which does not divide model.dim={cfg.dim},")
    rope = rope_parameters.write(pe, net.train_len) if isinstance(pe, Rotary) else {}
    if isinstance(pe, Rotary) and pe.dim != pe.head_dim:
        rope_type = rope["rope_parameters"]["rope_type"]
        if not arch.partial or rope_type not in arch.rope_types:
            wrong.append(f"pe.fraction={pe.fraction:g} with rope_type={rope_type}")
    if wrong:
        raise ValueError(f"{' and '.join(wrong)} is not what {arch.name} of transformers has; {_EXPORTABLE}")
    config = {theirs: getattr(cfg, ours) for ours, theirs in arch.sizes.items()}
    config |= {
        "architectures": [arch.name],
        "model_type": kind,
        "vocab_size": net.vocab_size,
        arch.sizes["hidden_dim"]: cfg.hidden,
        arch.eps: cfg.norm_eps,
        arch.activation: next(theirs for theirs, ours in reversed(_ACTIVATIONS.items()) if ours == cfg.mlp),
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tie_embeddings,
    }
    if isinstance(pe, Learned):
        dropouts = {"resid_pdrop": cfg.dropout, "embd_pdrop": cfg.dropout, "attn_pdrop": 0.0}
        return config | {"n_positions": pe.max_len} | dropouts
    biases: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": bool(cfg.bias), "mlp_bias": cfg.bias is True},
        "qwen3": {"attention_bias": bool(cfg.bias)},
        "phi3": {"resid_pdrop": cfg.dropout, "embd_pdrop": cfg.dropout},
        "starcoder2": {"use_bias": True, "residual_dropout": cfg.dropout, "embedding_dropout": cfg.dropout},
    }
    config |= {"num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_width, "sliding_window": None}
    return config | biases.get(kind, {}) | rope


def _kind(cfg: GPTConfig, pe: PositionEncoding) -> str:
    """The only model_type that may compute this."""
    if isinstance(pe, Learned):
        return "gpt2"
    if cfg.norm == "layernorm":
        return "starcoder2"
    if isinstance(pe, Rotary) and pe.dim != pe.head_dim:
        return "phi3"
    if cfg.qk_norm:
        return "qwen3"
    if cfg.bias == "qkv":
        return "qwen2"
    return "mistral" if cfg.dim % cfg.n_head and not cfg.bias else "llama"
