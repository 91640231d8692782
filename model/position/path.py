"""PaTH: positions as products of reflections that the text itself chooses."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import BLOCK, for_heads_of, in_blocks, softmax
from model.position.base import Context, Count, PositionEncoding, Shape
from model.position.forget import FoX
from model.position.ops import short_convolution


class PaTH(PositionEncoding):
    """PaTH attention (arXiv 2505.16381): on its way from key j to query i a key passes P_l = I - beta_l w_l w_l^T of
    every token l = j+1..i, so the score is k_j^T P_{j+1} ... P_i q_i / sqrt(D).

    w_l is a unit vector and 0 < beta_l < 2, both made of the layer's input: a product of reflections can count, permute
    and forget, which no fixed rotation can. Key heads have their own.

    Args:
        rank: of the projection to w.
        conv: tokens of the convolution over the projections, before the activation and the norm; 1: none.
    """

    decayed: tuple[str, ...] = ("down", "up", "strength")

    def __init__(self, shape: Shape, *, rank: Count = 32, conv: Count = 3, **options: Any) -> None:
        super().__init__(shape, **options)
        self.lookback = max(0, conv - 2)  # of reflection j + 1, the first after key j
        self.down = nn.Parameter(torch.zeros(rank, shape.dim))
        self.up = nn.Parameter(torch.zeros(shape.n_kv_head * shape.head_dim, rank))
        self.kernel = nn.Parameter(torch.zeros(shape.n_kv_head * shape.head_dim, conv)) if conv > 1 else None
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
            own = {"w": F.linear(F.linear(x, self.down.float()), self.up.float()), "beta": beta}
            return own | super().state(x)

    def passed(self, state: dict[str, Tensor]) -> Tensor:
        """What scores lose from the first token on: [B, Tk, H or 1], fp32 or better."""
        return torch.zeros_like(state["beta"][..., :1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        def block(
            q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, u: Tensor, end: Tensor, passed: Tensor,
            ctx: Context,
        ) -> Tensor:  # fmt: skip
            k, v, w, beta, u, end = (for_heads_of(q, x) for x in (k, v, w, beta, u, end))
            stop, way = k.size(2) - q.size(2), passed[:, :, -q.size(2) :, None] - passed[:, :, None]
            own_k, own_w = k[:, :, stop:], w[:, :, stop:]
            met, own_u = reflected(own_k, own_w, beta[:, :, stop:])
            reached = (q @ own_w.mT).tril()
            logits = [q @ own_k.mT - reached @ met]  # of the queries' own tokens, and then the blocks before them
            q = q - reached @ own_u
            while stop > 0:
                near = slice(max(0, stop - BLOCK), stop)
                logits.append(q @ end[:, :, near].mT)
                q = q - (q @ w[:, :, near].mT) @ u[:, :, near]
                stop = near.start
            scores = ctx.scale * (torch.cat(logits[::-1], dim=-1) + way.float())
            scores = scores.masked_fill(~ctx.visible(self.window), -torch.inf)
            return softmax(scores, ctx.sinks).to(v.dtype) @ v

        with torch.autocast(q.device.type, enabled=False):
            w = state["w"] if self.kernel is None else short_convolution(state["w"], self.kernel.float())
            w = F.silu(w).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, Hkv, Tk, D]
            w = w * (w.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            beta, k, past = state["beta"].mT[..., None], k.float(), k.size(2) - q.size(2)
            first, u, end = -past % BLOCK, [], []
            for i in range(-(-(first + k.size(2)) // BLOCK)):  # the blocks of `in_blocks`, and as many before them
                start = i * BLOCK - first
                own = slice(max(0, start), min(start + BLOCK, k.size(2)))
                met, of_block = reflected(k[:, :, own], w[:, :, own], beta[:, :, own])
                u.append(of_block)
                end.append(k[:, :, own] - met.mT @ w[:, :, own])
            keys = [k, v, w, beta, torch.cat(u, 2), torch.cat(end, 2), self.passed(state).transpose(1, 2)]
            return in_blocks(block, [q.float()], keys, ctx, window=self.window)


class PaTHFoX(PaTH, FoX):
    """PaTH with the forget gates of FoX. As in the released code their sum is scaled by 1 / sqrt(D) too."""

    decayed = (*PaTH.decayed, *FoX.decayed)

    passed = FoX.passed


def reflected(k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The product of the reflections of a block of c tokens (the WY representation), as (met [.., c, c], u [.., c, D]).

    What comes from behind leaves as x - (x w^T) u. Query i meets key j of the block with q k^T - (q w^T) met, w^T up to
    i. Key j leaves at the end as row j of k - met^T w.
    """
    weighted = beta * w
    right = torch.cat(((weighted @ k.mT).tril(-1), weighted), dim=-1)
    solved = torch.linalg.solve_triangular((weighted @ w.mT).tril(-1), right, upper=False, unitriangular=True)
    return solved[..., : k.size(2)], solved[..., k.size(2) :]
