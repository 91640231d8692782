"""The position interface: what a network tells its encoding, and the hooks an encoding may override."""

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from model.attention import attend


class Shape(NamedTuple):
    """What an encoding may know of the network it serves; the options of its YAML come beside it."""

    dim: int  # width of the residual stream
    n_head: int
    head_dim: int
    train_len: int  # tokens of a training sequence
    layer: int = 0  # index of the block, for encodings with one instance per block
    n_layer: int | None = None  # None: not known
    n_kv_head: int | None = None  # None: n_head


class Context(NamedTuple):
    """The positions of one forward pass, computed once for each instance of the encoding."""

    pos_q: Tensor  # int64 [Tq]
    pos_k: Tensor  # int64 [Tk], every key: the cached ones too
    rot_q: Any  # what `tables` returned for the queries
    rot_k: Any  # and for the keys that are rotated in this pass
    mask: Tensor | None  # None, bool [Tq, Tk], or float [H, Tq, Tk]: bias and causality in one
    causal: bool  # True: mask is None, and query t sees keys 0..t
    scale: float  # multiplies q.k: temperature / sqrt(head_dim)


class PositionEncoding(nn.Module):
    """Base class of every encoding, and by itself NoPE: no information on position but the causal mask.

    A member overrides the hooks it needs; the network calls all of them and never asks which encoding it has.
    No member keeps tables of angles or a maximal length in buffers: angles are computed once per forward, so
    a checkpoint fits every length and no dtype conversion can harm them.
    """

    per_layer = False
    """True: every block has its own instance."""

    relative = True
    """False: shifting all positions changes the result, as absolute encodings do."""

    cache_rotated = True
    """False: the cache keeps raw keys, because their rotation depends on the length of the call."""

    temperature = 1.0
    """Multiplies 1/sqrt(head_dim) in the softmax. Read once per forward."""

    linear_memory = True
    """A whole text is read in memory linear in its length. False: scores are held, so evaluation reads in pieces."""

    max_len: int | None = None
    """Longest text the encoding is defined for, in tokens; None: no limit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        """Add position to the token embeddings `x` [B, T, dim] at positions `pos` int64 [T]."""
        return x

    def tables(self, pos: Tensor, length: int) -> Any:
        """What `rotate` needs for positions `pos` int64 [T], in a text of `length` tokens so far."""
        return None

    def rotate(self, x: Tensor, table: Any) -> Tensor:
        """Turn queries or keys `x` [B, H, T, D] by `table`, the result of `tables` for their positions."""
        return x

    def rotate_key(self, x: Tensor, table: Any) -> Tensor:
        """What keys get instead of `rotate`, where they are treated differently from queries (xPos)."""
        return self.rotate(x, table)

    def cached_keys(self, k: Tensor, x: Tensor) -> Tensor:
        """What `attention` gets as keys, and the cache keeps: `k` [B, Hkv, T, D] after its rotation, or more channels.

        `x` [B, T, dim] is the layer's input, from which a projection of the encoding's own may add to them (CoPE).
        """
        return k

    def bias(self, pos_q: Tensor, pos_k: Tensor) -> Tensor | None:
        """What is added to the scores, fp32 [H, Tq, Tk]; entries with pos_k > pos_q are masked afterwards."""
        return None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Attention of q [B, H, Tq, D] over k, v [B, Hkv, Tk, D]: [B, H, Tq, D].

        Override it where a score depends on other scores (CoPE).
        """
        return attend(q, k, v, scale=ctx.scale, mask=ctx.mask, causal=ctx.causal)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fill every parameter, drawing from `generator` (on the CPU) alone."""
        assert not list(self.parameters()), f"{type(self).__name__} has parameters and no reset_parameters"

    def readings(self) -> list[Self]:
        """The ways to read a text with the trained weights: first as trained, then any extension of it.

        They share their parameters. Evaluation gives each its own rows, under its `label`.
        """
        return [self]

    label = "as trained"

    def reading_for(self, length: int) -> Self:
        """The reading meant for a text of `length` tokens."""
        return self

    def metrics(self) -> dict[str, Tensor]:
        """Scalars to log beside the validation loss: means over the forwards in evaluation mode since the last call."""
        return {}

    def resolved(self) -> dict[str, Any]:
        """Options whose null depends on the network or the training length, and what they became: a run records it."""
        return {}

    @property
    def family(self) -> str:
        """Encodings of one family can read each other's weights without training, for better or worse."""
        return type(self).__name__ if type(self) is not PositionEncoding else "no encoding"

    def describe(self) -> list[str]:
        """Lines to print at start-up: what a user should know of this encoding at these sizes."""
        return []

    def context(self, pos_q: Tensor, pos_k: Tensor, length: int, whole: bool) -> Context:
        """Everything the layers need for one forward pass.

        Args:
            pos_q: positions of the new tokens, int64 [Tq].
            pos_k: positions of all tokens, int64 [Tk], the new ones last.
            length: tokens read so far, the new ones included (a Python int).
            whole: the new tokens are the whole text, so that Tq == Tk.
        """
        # Autocast would turn a bias network's matrix products to bf16; positions need fp32.
        with torch.autocast(pos_q.device.type, enabled=False):
            rot_q = self.tables(pos_q, length)
            rot_k = rot_q if self.cache_rotated else self.tables(pos_k, length)
            bias = self.bias(pos_q, pos_k)
        causal = whole and bias is None
        if causal or (bias is None and pos_q.size(0) == 1):  # one query, the newest, sees every key
            mask = None
        else:
            mask = pos_q[:, None] >= pos_k[None, :]  # [Tq, Tk]
            if bias is not None:
                mask = bias.masked_fill(~mask, -torch.inf)  # [H, Tq, Tk]
        return Context(pos_q, pos_k, rot_q, rot_k, mask, causal, self.temperature / math.sqrt(self.head_dim))
