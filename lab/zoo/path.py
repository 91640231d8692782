"""PaTH: the position of a key relative to a query is a product of reflections that the tokens between them choose."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import BLOCK, exactly, for_heads_of, has_kernel, in_blocks, seen_keys, softmax
from model.position.base import Context, Count, PositionEncoding, Shape, overrides
from model.position.forget import FoX
from model.position.ops import short_convolution, unit_vectors


class Reflections(NamedTuple):
    """The reflections P_l = I - beta_l w_l w_l^T of a text's tokens, and their products over blocks of BLOCK tokens.

    The blocks of keys have the same boundaries as the blocks of queries in `in_blocks`. The H heads are those of the
    keys at first, and those of the queries once `_block` has repeated them.
    """

    w: Tensor  # unit vectors [B, H, T, D]
    beta: Tensor  # strengths [B, H, T, 1]
    u: Tensor  # [B, H, T, D]: a query x that crosses a whole block towards its start becomes x - (x w^T) u
    at_end: Tensor  # [B, H, T, D]: key j after the reflections from j + 1 to the end of its block


class PaTH(PositionEncoding):
    """PaTH attention (arXiv 2505.16381): between key j and query i stand the reflections P_l = I - beta_l w_l w_l^T of
    the tokens l = j+1..i, so the score is k_j^T P_{j+1} ... P_i q_i / sqrt(D).

    w_l is a unit vector and 0 < beta_l < 2, both made from the layer's input. A product of such reflections can count,
    permute and forget, which no fixed rotation can. Each key head has its own. w comes from a low-rank projection,
    `down` [rank, dim] and `up` [Hkv D, rank], and a convolution over tokens, `kernel` [Hkv D, conv]; beta comes from
    `strength` [Hkv, dim] and `strength_bias` [Hkv].

    Args:
        rank: rank of the projection to w.
        conv: width of the convolution in tokens, applied before the activation and the norm; 1: none.
    """

    kernels = "lab.kernels.path"
    decayed: tuple[str, ...] = ("down", "up", "strength")

    def __init__(self, shape: Shape, *, rank: Count = 32, conv: Count = 3, **options: Any) -> None:
        super().__init__(shape, **options)
        channels = shape.n_kv_head * shape.head_dim
        # The first reflection after key j is that of token j + 1, whose convolution reads `conv` tokens up to its own:
        # so the cache must keep conv - 2 tokens before key j.
        self.lookback = max(0, conv - 2)
        self.down = nn.Parameter(torch.zeros(rank, shape.dim))
        self.up = nn.Parameter(torch.zeros(channels, rank))
        self.kernel = nn.Parameter(torch.zeros(channels, conv)) if conv > 1 else None
        self.strength = nn.Parameter(torch.zeros(shape.n_kv_head, shape.dim))
        self.strength_bias = nn.Parameter(torch.zeros(shape.n_kv_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start the weights normal with std 0.02 and the bias at 0, as in the released code."""
        for p in (self.down, self.up, self.kernel, self.strength):
            if p is not None:
                nn.init.normal_(p, 0.0, 0.02, generator)
        nn.init.zeros_(self.strength_bias)
        super().reset_parameters(generator)  # those of FoX in `PaTHFoX`

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """The projections [B, T, Hkv D] before their convolution, and beta [B, T, Hkv]; fp32."""
        # In fp32: a key goes through one reflection for each token, and rounding errors accumulate.
        with torch.autocast(x.device.type, enabled=False):
            x = exactly(x)
            strength = F.linear(x, exactly(self.strength), exactly(self.strength_bias))
            beta = 2 * strength.sigmoid()  # [B, T, Hkv]
            low_rank = F.linear(x, exactly(self.down))  # [B, T, rank]
            w = F.linear(low_rank, exactly(self.up))  # [B, T, Hkv D]
            return {"w": w, "beta": beta, **super().state(x)}

    def log_gate_sums(self, state: dict[str, Tensor]) -> Tensor:
        """Sums over the tokens, from the first on, of the logs of forget gates: [B, Tk, H or 1], fp32 or better.

        PaTH has no gates, so they are zero here; `PaTHFoX` has those of FoX.
        """
        return torch.zeros_like(state["beta"][..., :1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        if has_kernel(q, ctx, gaps=True) and not overrides(self, PaTH, "reflections", "_block"):
            from lab.kernels import path as kernels  # needs Triton, which only comes with PyTorch for GPUs

            if q.size(3) <= kernels.MAX_WIDTH:
                return self._with_kernels(q, k, v, state, ctx)
        with torch.autocast(q.device.type, enabled=False):
            # Once for the call: `in_blocks` then gives each block of queries the reflections up to its own end.
            k = exactly(k)
            reflections = self.reflections(k, state, past=k.size(2) - q.size(2))
            log_gate_sums = self.log_gate_sums(state).transpose(1, 2)  # [B, H or 1, Tk]
            return in_blocks(self._block, [exactly(q)], [k, v, *reflections, log_gate_sums], ctx)

    def _with_kernels(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        """`attend` by `lab.kernels.path`, where `has_kernel`."""
        from lab.kernels import path as kernels

        with torch.autocast(q.device.type, enabled=False):
            w, beta = self.vectors_and_strengths(state)
            # The sum over j+1..i is that of query i less that of key j, which the kernels want the other way around.
            gates = None
            if overrides(self, PaTH, "log_gate_sums"):
                gates = -ctx.scale * self.log_gate_sums(state).transpose(1, 2)  # [B, H, Tk]
        first, last = seen_keys(q, ctx)
        return kernels.path(q, k, v, w, beta, first, last, scale=ctx.scale, keys=gates, sinks=ctx.sinks)

    def vectors_and_strengths(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Make the unit vectors [B, Hkv, Tk, D] and strengths [B, Hkv, Tk, 1] of the reflections of all tokens."""
        w = state["w"]  # [B, Tk, Hkv D]
        if self.kernel is not None:
            w = short_convolution(w, exactly(self.kernel))
        w = F.silu(w).unflatten(-1, (-1, self.head_dim))  # [B, Tk, Hkv, D]
        w = unit_vectors(w.transpose(1, 2))  # [B, Hkv, Tk, D]
        return w, state["beta"].mT[..., None]

    def reflections(self, k: Tensor, state: dict[str, Tensor], past: int) -> Reflections:
        """Make the reflections of all tokens of `k` [B, Hkv, Tk, D]; the first `past` tokens are keys alone."""
        w, beta = self.vectors_and_strengths(state)

        # Before a block of queries there must be whole blocks. `in_blocks` counts blocks from the first query on, so
        # the blocks here are counted from there too, towards the start of the text, and the first may be shorter.
        keys = k.size(2)
        missing = -past % BLOCK  # by this many tokens the first block is shorter
        u = []
        at_end = []
        for i in range(-(-(missing + keys) // BLOCK)):
            start = i * BLOCK - missing
            block = slice(max(0, start), min(start + BLOCK, keys))  # c tokens
            k_block = k[:, :, block]  # [B, Hkv, c, D]
            w_block = w[:, :, block]
            met, u_block = reflected(k_block, w_block, beta[:, :, block])  # [.., c, c], [.., c, D]
            u.append(u_block)
            at_end.append(k_block - met.mT @ w_block)
        return Reflections(w, beta, torch.cat(u, 2), torch.cat(at_end, 2))

    def _block(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        """Attention [B, H, Tq, D] of one block of queries.

        Args:
            q: [B, H, Tq, D].
            k, v: [B, Hkv, Tk, D].
            others: the fields of `Reflections`, what `log_gate_sums` returned, and the context.
        """
        *fields, log_gate_sums, ctx = others
        reflections = Reflections(*[for_heads_of(q, x) for x in fields])
        k = for_heads_of(q, k)
        v = for_heads_of(q, v)
        past = k.size(2) - q.size(2)
        q_sums = log_gate_sums[:, :, -q.size(2) :, None]
        decay = q_sums - log_gate_sums[:, :, None]  # [B, H or 1, Tq, Tk], sums over j+1..i
        # Within a block each pair has other reflections between query and key. Blocks before it are crossed as a whole,
        # by products of their reflections that were made once.
        near, q = within_block(q, k[:, :, past:], reflections.w[:, :, past:], reflections.beta[:, :, past:])
        far = through_earlier_blocks(q, reflections, past)
        scores = ctx.scale * (torch.cat([*far, near], dim=-1) + decay.to(near.dtype))  # [B, H, Tq, Tk]
        scores = scores.masked_fill(~ctx.visible(), -torch.inf)
        return softmax(scores, ctx.sinks).to(v.dtype) @ v


class PaTHFoX(PaTH, FoX):
    """PaTH with the forget gates of FoX. As in the released code the sum of ln f is scaled by 1 / sqrt(D), too."""

    decayed = (*PaTH.decayed, *FoX.decayed)
    log_gate_sums = FoX.log_gate_sums


def within_block(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Let queries meet the keys of their own block of c tokens.

    Args:
        q, k, w: [B, H, c, D].
        beta: [B, H, c, 1].

    Returns:
        The logits [B, H, c, c], valid where the key is not in the future; and the queries [B, H, c, D] as they leave
        the block at its start.
    """
    met, u = reflected(k, w, beta)
    reached = (q @ w.mT).tril()  # [B, H, c, c]: a query meets its own reflection and those before it
    return q @ k.mT - reached @ met, q - reached @ u


def through_earlier_blocks(q: Tensor, reflections: Reflections, past: int) -> list[Tensor]:
    """Let queries that have left their own block pass the blocks before it, the nearest first.

    Queries and keys meet at the end of the keys' block, for which `at_end` holds the keys, so that each block takes
    three matrix products however many reflections it has. Where a window cuts off the beginning of the oldest block,
    the queries are wrong after it, but no key is left for them to meet.

    Args:
        q: [B, H, Tq, D].
        reflections: those of all keys; only those of the first `past` tokens are used.

    Returns:
        The logits of each block, [B, H, Tq, up to BLOCK], the oldest block first.
    """
    logits = []
    stop = past
    while stop > 0:
        block = slice(max(0, stop - BLOCK), stop)
        logits.append(q @ reflections.at_end[:, :, block].mT)  # [B, H, Tq, c]
        q = q - (q @ reflections.w[:, :, block].mT) @ reflections.u[:, :, block]
        stop = block.start
    return logits[::-1]


def reflected(k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply the reflections of a block of c tokens (the WY representation).

    The product of I - beta_l w_l w_l^T over the block is I - w^T u with u = (I + L)^-1 (beta w), where L is the part of
    (beta w) w^T below the diagonal: one triangular system instead of c products. `met` is the solution of the same
    system for the keys, with the part of (beta w) k^T below the diagonal on its right side.

    - A query x that enters the block at its end leaves it at its start as x - (x w^T) u.
    - The score of query i and key j of the block is entry i, j of q k^T - (q w^T) met, with q w^T cut to its lower
      triangle.
    - Key j leaves the block at its end as row j of k - met^T w.

    Args:
        k, w: [.., c, D].
        beta: [.., c, 1].

    Returns:
        met [.., c, c] and u [.., c, D].
    """
    # Both systems have the same left side, so they are solved as one.
    weighted = beta * w
    right = torch.cat(((weighted @ k.mT).tril(-1), weighted), dim=-1)  # [.., c, c + D]
    left = (weighted @ w.mT).tril(-1)  # [.., c, c]; `unitriangular` takes its diagonal as ones
    solved = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True)
    tokens = k.size(2)
    return solved[..., :tokens], solved[..., tokens:]
