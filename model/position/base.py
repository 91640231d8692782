"""The position interface: what the network tells an encoding, and what an encoding may override."""

import math
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from conf.schema import GPTConfig
from model.attention import Bias, Context, attention

NO_ENCODING = "no encoding"  # the family of NoPE
# The scale of an encoding that reads texts of any length. A number, since results files compare and sort scales.
ANY_LENGTH = math.inf
Count = Annotated[int, Field(ge=1)]
Window = Count | Annotated[float, Field(gt=0, lt=1)]  # in tokens, or as a share of train_len
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class Shape(NamedTuple):
    """Sizes of the network that an encoding is part of."""

    dim: int  # width of the residual stream
    n_head: int
    n_kv_head: int
    head_dim: int
    train_len: int  # tokens of a training sequence
    n_layer: int

    @classmethod
    def of(cls, cfg: GPTConfig, train_len: int) -> "Shape":
        """Return the sizes of a network that trains on `train_len` tokens."""
        return cls(cfg.dim, cfg.n_head, cfg.kv_heads, cfg.head_width, train_len, cfg.n_layer)


class PositionEncoding(nn.Module):
    """Base class of every encoding. By itself it is NoPE: nothing tells positions apart but the causal mask.

    A subclass overrides the hooks that it needs: `embed`, `tables`, `state`, `rotate`, `bias`, `attend` and
    `reset_parameters`. The layer that holds it does the rest, see `model.position.layer`. Options of the YAML are
    keyword arguments of the constructor, checked by their annotations. Tables are computed once per forward pass and
    never kept in buffers, so a checkpoint fits every length and no dtype conversion can harm them.

    Args:
        shape: sizes of the network.
        window: query i sees the keys with i - j < window, itself included; None: all keys up to itself. In tokens, or
            as a share of train_len if it is below 1.
        temperature: what multiplies q.k of query i, which sees n = i + 1 keys, or `window` if that is less; L is
            original_len, or train_len. "log": max(1, ln n / ln L), as with ReRoPE; "llama4":
            1 + 0.1 ln(1 + floor(n / L)); "ssmax": s ln n (arXiv 2501.19399), s learned for each head, from 1 / ln L;
            "head": a factor learned for each head, from 1 (arXiv 2404.12224); a number: that factor.
    """

    # What the encoding computes.
    shared = False  # True: one instance serves all layers; an encoding without parameters is shared anyway
    decayed: tuple[str, ...] = ()  # parameters that get weight decay; it would pull tables and biases towards NoPE
    lookback: int = 0  # tokens before the oldest visible key whose `state` `attend` also needs
    logit_scale: float = 1.0  # multiplies 1 / sqrt(head_dim) in the softmax
    max_len: int | None = None  # longest text, in tokens, that it is defined for; a longer one is a ValueError
    has_softmax = True  # False: `attend` has another normalisation, in which model.sinks has no place
    linear_in_q = True  # False: scores are not proportional to q, and a hook applies `ctx.tempered` itself
    # True: attention depends on distances between tokens and on `state` alone, token by token, and is computed by
    # `attention`, or by kernels with `seen_keys`. So a document may stand anywhere in a packed row, and kernels read it
    # there. False: it is taken out, and read as if it were alone. Not inherited.
    in_place = True
    kernels = "lab.kernels.flash"  # the module of the kernels that `attend` may use where `ctx.kernels`
    # Which trained weights the encoding can read, and which encodings can read its own.
    family: str = ""  # encodings of one family read each other's weights without training; "": its class alone does
    zero_shot: tuple[str, ...] = ()  # encodings of conf/pe that an evaluation reads its weights with; not inherited
    # Set by `Scaled` alone.
    scales: tuple[float, ...] = (1.0,)  # that an evaluation measures; the first is the one it trains at
    active_scale: float = 1.0  # the scale in use, see GPT.at_scale

    def __init_subclass__(cls) -> None:
        # `zero_shot` is not inherited: an encoding that can read RoPE's weights may be wrong for those of a variant.
        super().__init_subclass__()
        cls.zero_shot = vars(cls).get("zero_shot", ())
        # Nor is `in_place`: a hook that a subclass overrides may depend on the place in the text.
        cls.in_place = vars(cls).get("in_place", False)

    def __init__(
        self, shape: Shape, *, window: Window | None = None,
        temperature: Literal["none", "log", "llama4", "ssmax", "head"] | Positive = "none",
    ) -> None:  # fmt: skip
        super().__init__()
        self.n_head = shape.n_head
        self.n_kv_head = shape.n_kv_head
        self.head_dim = shape.head_dim
        self.train_len = shape.train_len
        if isinstance(window, float):
            window = max(1, round(window * shape.train_len))
        self.window = window
        self.temperature = temperature
        if temperature == "ssmax":
            self.ssmax = nn.Parameter(torch.zeros(shape.n_head, 1, 1))
        if temperature == "head":
            self.head_factor = nn.Parameter(torch.zeros(shape.n_head, 1, 1))
        if type(self) is PositionEncoding:
            self.family = NO_ENCODING
        elif not self.family:
            self.family = type(self).__name__
        # The simplest class whose training is the same, bit for bit: a scaling that trains unscaled trains as RoPE.
        self.trains_as: type[PositionEncoding] = type(self)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        """Token embeddings `x` [B, T, dim] with a vector for each position of `pos`, int64 [T] or [B, T], added.

        Called once for each distinct encoding, so an override belongs in one that all layers share.
        """
        return x

    def tables(self, pos: Tensor, length: int) -> Any:
        """Anything that `rotate`, `bias` or `attend` need at positions `pos` int64 [T] in a text of `length` tokens.

        Computed once per forward pass, with autocast off.
        """
        return None

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """Named tensors [B, T, ...] made from the input `x` [B, T, dim] of attention; cached beside k and v."""
        return {}

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Rotated q [B, H, Tq, D] and k [B, Hkv, Tk, D], which belong to the newest tokens of `ctx.tables`."""
        return q, k

    # Optional: a method (q, ctx) -> [H, tq, tk] or [B, H, tq, tk], added to the scaled scores of a block of queries.
    bias: Bias | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        """The attention of one layer, [B, H, Tq, D]; q, k and v are not rotated.

        An override is responsible for:
        - windows and causality: `ctx.visible()`, or `attention` and `in_blocks`, which know `ctx.window`;
        - sinks: `softmax` with `ctx.sinks`, or `has_softmax = False`;
        - gaps: with `ctx.has_gaps` neighbours among the keys may be far apart; `ctx.pos_q` and `ctx.pos_k` are right,
          and `has_kernel` says no unless it is told that the kernels know gaps;
        - the cache: Tk >= Tq, the queries are the newest keys, and k is raw, so that it is rotated in each call;
        - grouped heads: `for_heads_of` repeats keys and values for the heads that share them;
        - memory: `in_blocks` holds the scores of one block of queries at a time;
        - precision: k and v may be bf16 and autocast may be on, but sums over many keys need fp32 and autocast off;
        - torch.compile: no branch on the value of a tensor while `torch.compiler.is_compiling()`;
        - the scale: `ctx.scale`, not 1 / sqrt(D); and `ctx.tempered(q)` if scores are not proportional to q
          (`linear_in_q = False`).

        Args:
            q: queries [B, H, Tq, D].
            k, v: all visible keys and values [B, Hkv, Tk, D]; H is a multiple of Hkv.
            state: what `state` returned for the same tokens as k: each [B, Tk, ...].
        """
        q, k = self.rotate(q, k, ctx)
        return attention(q, k, v, ctx, bias=self.bias)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Set every parameter of a subclass to its initial value, in place; the constructor's values are discarded.

        Args:
            generator: draws the random ones, on the CPU.
        """

    def metrics(self) -> dict[str, Tensor]:
        """Scalars to log beside the validation loss: means over the evaluation passes since the last call."""
        return {}

    def remedy(self, length: int) -> str:
        """Say what to do about a text of `length` tokens, longer than `max_len`."""
        return "use another encoding"


def overrides(pe: PositionEncoding, base: type[PositionEncoding], *methods: str) -> bool:
    """True if the class of `pe` has one of the `methods` from elsewhere than `base`: a subclass or a mixin.

    What `base` computes in another way than by these methods, such as with kernels, would ignore them.
    """
    return any(getattr(type(pe), name) is not getattr(base, name) for name in methods)


class Scaled(PositionEncoding):
    """Mixin of encodings that read longer text than the weights were trained on, at a scale.

    Training up to `original_len` tokens is unscaled, bit for bit; training beyond it is at the scale. An evaluation
    measures both: see `scales`. The constructor of a subclass calls `set_scales`.

    Args:
        original_len: length in tokens the weights were trained at before any extension; default train_len.
    """

    unscaled = 1.0  # the scale that changes nothing, and the smallest one allowed
    unscaled_as: type[PositionEncoding] | None = None  # the simpler encoding that it equals while unscaled, if any

    def __init__(
        self, shape: Shape, *, original_len: Annotated[int, Field(ge=2)] | None = None, **options: Any
    ) -> None:
        super().__init__(shape, **options)
        self.original_len = original_len or shape.train_len

    def set_scales(self, scale: float, train_scale: float | None = None) -> None:
        """Set the scale to read at and the one to train at; None: unscaled, unless train_len is beyond original_len."""
        self.scale = scale
        if train_scale is None:
            train_scale = scale if self.train_len > self.original_len else self.unscaled
        self.scales = tuple(dict.fromkeys((train_scale, scale)))  # one entry if they are equal
        self.active_scale = train_scale
        # The simpler encoding has no original_len, which a temperature depends on.
        same_temperature = self.temperature == "none" or self.original_len == self.train_len
        if self.unscaled_as is not None and train_scale == self.unscaled and same_temperature:
            self.trains_as = self.unscaled_as

    def describe(self) -> list[str]:
        """Lines to print when a run starts."""
        names = ["any length" if scale == ANY_LENGTH else f"scale {scale:g}" for scale in self.scales]
        plan = f"trains at {names[0]}, is evaluated at {' and '.join(names)}"
        return [f"{type(self).__name__}: {plan}; original length {self.original_len} tokens"]


class Scaling(Scaled):
    """Base of the scalings whose scale is an option.

    Args:
        scale: target length / original length, at least 1.
        train_scale: train at this scale instead, whatever the lengths. From scratch the scaled frequencies are then
            merely other frequencies, and extrapolate worse than unscaled ones.
    """

    def __init__(self, shape: Shape, *, scale: float = 4.0, train_scale: float | None = None, **options: Any) -> None:
        super().__init__(shape, **options)
        for name, value in (("scale", scale), ("train_scale", train_scale)):
            if value is not None and not self.unscaled <= value < math.inf:
                bound = f"at least {self.unscaled:g}, the scale that changes nothing"
                raise ValueError(f"pe.{name}={value:g} must be finite and {bound}")
        self.train_scale = train_scale
        self.set_scales(scale, train_scale)
