"""PaTH: positions as products of reflections that the text itself chooses."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import BLOCK, for_heads_of, in_blocks, softmax
from model.position.base import Context, Count, PositionEncoding, Shape
from model.position.forget import FoX
from model.position.ops import short_convolution, unit_vectors


class Reflections(NamedTuple):
    """The reflections P_l = I - beta_l w_l w_l^T of a text's tokens, and what is made of them once for each block.

    Blocks are of BLOCK tokens, the same for the keys as for the queries of `in_blocks`.
    """

    w: Tensor  # unit vectors [B, H, T, D]
    beta: Tensor  # strengths [B, H, T, 1]
    u: Tensor  # a query x that crosses a whole block towards its start becomes x - (x w^T) u: [B, H, T, D]
    at_end: Tensor  # key j after the reflections from j + 1 to the end of its block: [B, H, T, D]


class PaTH(PositionEncoding):
    """PaTH attention (arXiv 2505.16381): on its way from key j to query i a key passes P_l = I - beta_l w_l w_l^T of
    every token l = j+1..i, so the score is k_j^T P_{j+1} ... P_i q_i / sqrt(D).

    w_l is a unit vector and 0 < beta_l < 2, both made of the layer's input: a product of reflections can count, permute
    and forget, which no fixed rotation can. Key heads have their own: w comes from a low-rank projection `down`
    [rank, dim], `up` [Hkv D, rank] and a convolution `kernel` [Hkv D, conv], beta from `strength` [Hkv, dim] and
    `strength_bias` [Hkv].

    Args:
        rank: of the projection to w.
        conv: tokens of the convolution over the projections, before the activation and the norm; 1: none.
    """

    decayed: tuple[str, ...] = ("down", "up", "strength")

    def __init__(self, shape: Shape, *, rank: Count = 32, conv: Count = 3, **options: Any) -> None:
        super().__init__(shape, **options)
        channels = shape.n_kv_head * shape.head_dim
        self.lookback = max(0, conv - 2)  # of reflection j + 1, the first after key j
        self.down = nn.Parameter(torch.zeros(rank, shape.dim))
        self.up = nn.Parameter(torch.zeros(channels, rank))
        self.kernel = nn.Parameter(torch.zeros(channels, conv)) if conv > 1 else None
        self.strength = nn.Parameter(torch.zeros(shape.n_kv_head, shape.dim))
        self.strength_bias = nn.Parameter(torch.zeros(shape.n_kv_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """As in the released code: normal with std 0.02, the bias 0."""
        for p in (self.down, self.up, self.kernel, self.strength):
            if p is not None:
                nn.init.normal_(p, 0.0, 0.02, generator)
        nn.init.zeros_(self.strength_bias)
        super().reset_parameters(generator)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """The projections [B, T, Hkv D] before their convolution, and beta [B, T, Hkv]; fp32."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            beta = 2 * F.linear(x, self.strength.float(), self.strength_bias.float()).sigmoid()
            w = F.linear(F.linear(x, self.down.float()), self.up.float())
            return {"w": w, "beta": beta, **super().state(x)}

    def passed(self, state: dict[str, Tensor]) -> Tensor:
        """The sum of what scores lose from the first token on: [B, Tk, H or 1], fp32 or better. Here zero."""
        return torch.zeros_like(state["beta"][..., :1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            k = k.float()
            reflections = self.reflections(k, state, past=k.size(2) - q.size(2))
            passed = self.passed(state).transpose(1, 2)  # [B, H or 1, Tk]
            return in_blocks(self._block, [q.float()], [k, v, *reflections, passed], ctx)

    def reflections(self, k: Tensor, state: dict[str, Tensor], past: int) -> Reflections:
        """Make the reflections of all tokens of `k` [B, Hkv, Tk, D], the first `past` of which are no queries."""
        w = state["w"]
        if self.kernel is not None:
            w = short_convolution(w, self.kernel.float())
        w = unit_vectors(F.silu(w).unflatten(-1, (-1, self.head_dim)).transpose(1, 2))  # [B, Hkv, Tk, D]
        beta = state["beta"].mT[..., None]  # [B, Hkv, Tk, 1]

        # A block of queries must find whole blocks before it. `in_blocks` counts its blocks from the first query, so
        # these continue towards the start of the text, where the first one has what is left over.
        keys = k.size(2)
        missing = -past % BLOCK  # tokens that the first block lacks
        u = []
        at_end = []
        for i in range(-(-(missing + keys) // BLOCK)):
            start = i * BLOCK - missing
            block = slice(max(0, start), min(start + BLOCK, keys))
            met, u_block = reflected(k[:, :, block], w[:, :, block], beta[:, :, block])
            u.append(u_block)
            at_end.append(k[:, :, block] - met.mT @ w[:, :, block])
        return Reflections(w, beta, torch.cat(u, 2), torch.cat(at_end, 2))

    def _block(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        """Attention [B, H, Tq, D] of one block of queries; `others`: the reflections, `passed`, and the context."""
        *fields, passed, ctx = others
        reflections = Reflections(*[for_heads_of(q, x) for x in fields])
        k = for_heads_of(q, k)
        v = for_heads_of(q, v)
        past = k.size(2) - q.size(2)
        lost = passed[:, :, -q.size(2) :, None] - passed[:, :, None]  # [B, H, Tq, Tk]
        near, q = within_block(q, k[:, :, past:], reflections.w[:, :, past:], reflections.beta[:, :, past:])
        far = through_earlier_blocks(q, reflections, past)
        scores = ctx.scale * (torch.cat([*far, near], dim=-1) + lost.float())
        scores = scores.masked_fill(~ctx.visible(), -torch.inf)
        return softmax(scores, ctx.sinks).to(v.dtype) @ v


class PaTHFoX(PaTH, FoX):
    """PaTH with the forget gates of FoX. As in the released code their sum is scaled by 1 / sqrt(D) too."""

    decayed = (*PaTH.decayed, *FoX.decayed)

    passed = FoX.passed


def within_block(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Let queries meet the keys of their own block of c tokens.

    Args:
        q, k, w: [B, H, c, D]. beta: [B, H, c, 1].

    Returns:
        The logits [B, H, c, c], right where the key is not in the future; and the queries [B, H, c, D] as they leave
        the block at its start.
    """
    met, u = reflected(k, w, beta)
    reached = (q @ w.mT).tril()  # a query meets its own reflection and those before it
    return q @ k.mT - reached @ met, q - reached @ u


def through_earlier_blocks(q: Tensor, reflections: Reflections, past: int) -> list[Tensor]:
    """Let queries that have left their own block pass the blocks before it, the nearest first.

    A key is met at the end of its block, where `at_end` has it ready, so that each block takes three products of
    matrices however many reflections it has. Where a window cuts off the beginning of the oldest block, what the
    queries become after it is wrong, but nobody meets them there.

    Args:
        q: [B, H, Tq, D].
        reflections: of the first `past` tokens, and more.

    Returns:
        The logits of each block, [B, H, Tq, up to BLOCK], the oldest block first.
    """
    logits = []
    stop = past
    while stop > 0:
        block = slice(max(0, stop - BLOCK), stop)
        logits.append(q @ reflections.at_end[:, :, block].mT)
        q = q - (q @ reflections.w[:, :, block].mT) @ reflections.u[:, :, block]
        stop = block.start
    return logits[::-1]


def reflected(k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply the reflections of a block of c tokens (the WY representation).

    The product of I - beta_l w_l w_l^T over the block is I - w^T u with u = (I + L)^-1 (beta w), L the part of
    (beta w) w^T below the diagonal: one triangular system instead of c products. `met` solves the same system for the
    keys.

    - A query x that enters behind the block's last token leaves before its first as x - (x w^T) u.
    - Query i meets key j of the block with q k^T - (q w^T) met, w^T up to i.
    - Key j leaves at the block's end as row j of k - met^T w.

    Args:
        k, w: [.., c, D]. beta: [.., c, 1].

    Returns:
        met [.., c, c] and u [.., c, D].
    """
    weighted = beta * w
    right = torch.cat(((weighted @ k.mT).tril(-1), weighted), dim=-1)  # [.., c, c + D]
    left = (weighted @ w.mT).tril(-1)  # its diagonal counts as ones
    solved = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True)
    tokens = k.size(2)
    return solved[..., :tokens], solved[..., tokens:]
