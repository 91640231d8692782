"""The position interface: what the network tells an encoding, and what an encoding may override."""

import math
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from conf.schema import GPTConfig
from model.attention import Context, attention

NO_ENCODING = "no encoding"  # the family of NoPE
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class Shape(NamedTuple):
    """What an encoding may know of the network it serves."""

    dim: int  # width of the residual stream
    n_head: int
    n_kv_head: int
    head_dim: int
    train_len: int  # tokens of a training sequence
    n_layer: int

    @classmethod
    def of(cls, cfg: GPTConfig, train_len: int) -> "Shape":
        return cls(cfg.dim, cfg.n_head, cfg.kv_heads, cfg.head_width, train_len, cfg.n_layer)


class PositionEncoding(nn.Module):
    """Base class of every encoding. By itself it is NoPE: no position but what causality gives.

    A subclass overrides what it needs. Options of the YAML are keyword arguments of the constructor, checked by their
    annotations. Tables are computed once per forward pass and never kept in buffers, so a checkpoint fits every length
    and no dtype conversion can harm them.

    Args:
        shape: sizes of the network.
        window: query i sees the keys with i - j < window, itself included; None: all keys up to itself.
        temperature: what multiplies q.k of query i, which sees n = i + 1 keys, or `window` if that is less; L is
            original_len, or train_len. "log": max(1, ln n / ln L), as with ReRoPE; "llama4":
            1 + 0.1 ln(1 + floor(n / L)); "ssmax": s ln n (arXiv 2501.19399), s learned for each head, from 1 / ln L.
    """

    shared = False  # True: one instance serves all layers; an encoding without parameters is shared anyway
    decayed: tuple[str, ...] = ()  # parameters that get weight decay; it would pull tables and biases towards NoPE
    logit_scale: float = 1.0  # multiplies 1 / sqrt(head_dim) in the softmax
    max_len: int | None = None  # longest text, in tokens, that it is defined for; a longer one is a ValueError
    scales: tuple[float, ...] = (1.0,)  # that an evaluation measures; the first is the one it trains at
    active_scale: float = 1.0  # the scale in use, see GPT.at_scale
    lookback: int = 0  # tokens before the oldest visible key whose `state` `attend` needs too
    has_softmax = True  # False: `attend` normalises otherwise, so that there is nothing for model.sinks to do
    zero_shot: tuple[str, ...] = ()  # encodings of conf/pe that read its weights in an evaluation; not inherited

    def __init__(
        self, shape: Shape, *, window: Count | None = None,
        temperature: Literal["none", "log", "llama4", "ssmax"] = "none",
    ) -> None:  # fmt: skip
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = shape.n_head, shape.n_kv_head, shape.head_dim
        self.train_len, self.window, self.temperature = shape.train_len, window, temperature
        if temperature == "ssmax":
            self.ssmax = nn.Parameter(torch.zeros(shape.n_head, 1, 1))
        self.has_bias = type(self).bias is not PositionEncoding.bias

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        """Token embeddings `x` [B, T, dim] with positions `pos` int64 [T] or [B, T] added. Only for encodings that all
        layers share."""
        return x

    def tables(self, pos: Tensor, length: int) -> Any:
        """What `rotate` or `bias` need at positions `pos` int64 [length]; once per forward pass, autocast off."""
        return None

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """Named tensors [B, T, ...] made of what a layer's attention reads, `x` [B, T, dim], cached beside k and v."""
        return {}

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Rotated q [B, H, Tq, D] and k [B, Hkv, Tk, D]; they are the newest tokens of `ctx.tables`."""
        return q, k

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        """What is added to the scaled scores of a block of queries: [H, tq, tk] or [B, H, tq, tk]."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        """What the network calls: `attend`, with the temperature."""
        return self.attend(self.tempered(q, ctx), k, v, state, ctx)

    def tempered(self, q: Tensor, ctx: Context) -> Tensor:
        """Queries [B, H, Tq, D] times the temperature at their positions."""
        if self.temperature == "none":
            return q
        n, length = (ctx.pos_q + 1)[:, None].float(), self.original_length
        if self.window is not None:
            n = n.clamp(max=self.window)
        if self.temperature == "log":
            factor = (n.log() / math.log(length)).clamp(min=1)  # [Tq, 1]
        elif self.temperature == "llama4":
            factor = 1 + 0.1 * (n / length).floor().log1p()
        else:
            factor = self.ssmax.float() * n.log()  # [H, Tq, 1]
        return (q * factor).to(q.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        """The attention of one layer, [B, H, Tq, D], of queries [B, H, Tq, D] that are not rotated.

        `k` and `v` are all visible keys and values [B, Hkv, Tk, D], not rotated either; H is a multiple of Hkv.
        `state` is what `state` returned for the same tokens as k: each [B, Tk, ...].
        """
        q, k = self.rotate(q, k, ctx)
        return attention(q, k, v, ctx, bias=self.bias if self.has_bias else None, window=self.window)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Set all parameters to their initial values, in place. ValueError if `reset_parameters` leaves one out."""
        for p in self.parameters():
            nn.init.constant_(p, math.nan)
        self.reset_parameters(generator)
        if self.temperature == "ssmax":
            nn.init.constant_(self.ssmax, 1 / math.log(self.original_length))
        if unset := [name for name, p in self.named_parameters() if p.isnan().any()]:
            raise ValueError(f"{type(self).__name__}.reset_parameters must set {', '.join(unset)}")

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Set the initial values of all parameters of a subclass in place: those of the constructor do not count. Draw
        from `generator`, on the CPU."""

    def metrics(self) -> dict[str, Tensor]:
        """Scalars to log beside the validation loss: means over the evaluation passes since the last call."""
        return {}

    def describe(self) -> list[str]:
        """Lines to print at start-up."""
        return []

    def remedy(self, length: int) -> str:
        """What to do about a text of `length` tokens, longer than `max_len`."""
        return "use another encoding"

    @property
    def family(self) -> str:
        """Encodings of one family can read each other's weights without training."""
        return type(self).__name__ if type(self) is not PositionEncoding else NO_ENCODING

    @property
    def original_length(self) -> int:
        """Tokens, at least 2, that the weights were first trained at."""
        return max(2, getattr(self, "original_len", self.train_len))

    @property
    def cached_tokens(self) -> int | None:
        """Newest tokens that may have an influence, and that the cache keeps; None: all."""
        return None if self.window is None else self.window + self.lookback

    def check_length(self, length: int) -> None:
        """Raise ValueError for a text of more than `max_len` tokens."""
        if self.max_len is not None and length > self.max_len:
            end = f"the {self.max_len} positions of {type(self).__name__} at scale {self.active_scale:g}"
            raise ValueError(f"a text of {length} tokens is beyond {end}: {self.remedy(length)}")

    def context(self, pos: Tensor, n_new: int, length: int) -> Context:
        """The context of a forward pass over the last `n_new` of the tokens at `pos` int64 [T].

        In a text of `length` tokens, of which all others are missing if there are more than T.
        """
        self.check_length(length)
        # Autocast would turn the matrix products of a bias network to bf16; positions need fp32.
        with torch.autocast(pos.device.type, enabled=False):
            tables = self.tables(pos, length)
        scale = self.logit_scale / math.sqrt(self.head_dim)
        return Context(pos[-n_new:], pos, length, tables, scale, has_gaps=pos.size(0) < length)


class Scaled(PositionEncoding):
    """Base of the scalings: how a model trained at `original_len` reads longer text.

    Training at a train_len up to `original_len` runs unscaled, bit for bit; training beyond it runs at `scale`. An
    evaluation measures both: see `scales`.

    Args:
        scale: target length / original length, at least 1.
        train_scale: train at this scale instead, whatever the lengths. From scratch the scaled frequencies are then
            merely other frequencies, and extrapolate worse than unscaled ones.
        original_len: length in tokens the weights were trained at before any extension; default train_len.
    """

    unscaled = 1.0  # the scale that changes nothing, and the smallest one allowed

    def __init__(
        self, shape: Shape, *, scale: float = 4.0, train_scale: float | None = None,
        original_len: Annotated[int, Field(ge=2)] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, **options)
        for name, value in (("scale", scale), ("train_scale", train_scale)):
            if value is not None and not self.unscaled <= value < math.inf:
                raise ValueError(f"pe.{name}={value:g} must be at least {self.unscaled:g}, which means no scaling")
        self.original_len = original_len or shape.train_len
        self.scale, self.train_scale = scale, train_scale
        if train_scale is None:
            train_scale = scale if shape.train_len > self.original_len else self.unscaled
        self.scales = tuple(dict.fromkeys((train_scale, scale)))
        self.active_scale = train_scale

    def describe(self) -> list[str]:
        measured = " and ".join(f"{scale:g}" for scale in self.scales)
        plan = f"trains at scale {self.scales[0]:g}, is evaluated at {measured}"
        return [f"{type(self).__name__}: {plan}; original length {self.original_len} tokens"]
