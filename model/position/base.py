"""The position interface: what the network tells an encoding, and what an encoding may override."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.attention import Context, attention


class Shape(NamedTuple):
    """What an encoding may know of the network it serves."""

    dim: int  # width of the residual stream
    n_head: int
    n_kv_head: int
    head_dim: int
    train_len: int  # tokens of a training sequence
    n_layer: int


class PositionEncoding(nn.Module):
    """Base class of every encoding. By itself it is NoPE: no position but what causality gives.

    A subclass overrides what it needs; the network calls every method and never asks which encoding it has. Options
    of the YAML are keyword arguments of the constructor. No encoding keeps angles or a maximal length in buffers:
    tables are computed once per forward pass, so a checkpoint fits every length and no dtype conversion can harm them.

    Args:
        shape: sizes of the network.
        window: query i sees the keys with i - j < window, itself included; None: all keys up to itself.

    Raises:
        ValueError: window is smaller than 1.
    """

    shared = False
    """True: one instance serves all layers. An encoding without parameters is shared anyway."""

    decayed: tuple[str, ...] = ()
    """Names of the parameters that get weight decay. Tables and biases should not: decay pulls them towards NoPE."""

    logit_scale: float = 1.0
    """Multiplies 1 / sqrt(head_dim) in the softmax."""

    max_len: int | None = None
    """Longest text, in tokens, that the encoding is defined for; None: no limit."""

    scales: tuple[float, ...] = (1.0,)
    """The scales that an evaluation measures. The first is the one it trains at."""

    zero_shot: tuple[str, ...] = ()
    """Encodings of conf/pe with which an evaluation reads its weights by default, too, without training."""

    active_scale: float = 1.0
    """The scale in use: see GPT.at_scale."""

    def __init__(self, shape: Shape, *, window: int | None = None) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ValueError(f"pe.window={window} must be at least 1, the token itself, or null for no window")
        self.head_dim, self.window = shape.head_dim, window

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        """Token embeddings `x` [B, T, dim] with position added. Only for encodings that all layers share."""
        return x

    def tables(self, pos: Tensor, length: int) -> Any:
        """What `rotate` or `bias` need at positions `pos` int64 [length]; once per forward pass, autocast off."""
        return None

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """Named tensors [B, T, ...] made of a layer's normed input `x` [B, T, dim], cached beside its k and v."""
        return {}

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Rotated q [B, H, Tq, D] and k [B, Hkv, Tk, D]; they are the newest tokens of `ctx.tables`."""
        return q, k

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        """What is added to the scaled scores: [H, Tq, Tk] or [B, H, Tq, Tk].

        Called for one block of queries at a time, so that no T x T tensor exists.
        """
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        """The attention of one layer, [B, H, Tq, D].

        Args:
            q: queries [B, H, Tq, D], not rotated.
            k, v: all visible keys and values [B, Hkv, Tk, D], not rotated; H is a multiple of Hkv.
            state: what `state` returned for the same tokens as k: each [B, Tk, ...].
        """
        q, k = self.rotate(q, k, ctx)
        has_bias = type(self).bias is not PositionEncoding.bias
        return attention(q, k, v, ctx, bias=self.bias if has_bias else None, window=self.window)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Set the initial parameters in place. Draw from `generator`, which is on the CPU."""

    def metrics(self) -> dict[str, Tensor]:
        """Scalars to log beside the validation loss: means over the evaluation passes since the last call."""
        return {}

    def describe(self) -> list[str]:
        """Lines to print at start-up."""
        return []

    @property
    def family(self) -> str:
        """Encodings of one family can read each other's weights without training."""
        return type(self).__name__ if type(self) is not PositionEncoding else "no encoding"

    def context(self, pos: Tensor, n_new: int, length: int) -> Context:
        """The context of a forward pass over the last `n_new` of the tokens at `pos` int64 [length]."""
        # Autocast would turn the matrix products of a bias network to bf16; positions need fp32.
        with torch.autocast(pos.device.type, enabled=False):
            tables = self.tables(pos, length)
        return Context(pos[-n_new:], pos, length, tables, self.logit_scale / math.sqrt(self.head_dim))
