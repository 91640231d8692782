"""Stick-breaking attention: the nearest match takes its share of the weight first, and no softmax does.

For: an order without positions. Has shown: see docs. Leaves: when nothing compares with it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import exactly, for_heads_of, in_blocks, products
from model.position.base import Context, PositionEncoding, Shape
from model.position.ops import sums_to_the_end


class StickBreaking(PositionEncoding):
    """Stick-breaking attention (arXiv 2410.17980) instead of a softmax: with b_ij = sigmoid(scale q_i.k_j), key j < i
    takes the share b_ij of the weight that the keys nearer to i have left, the product of their 1 - b_il.

    So the nearest match wins, and positions enter in no other way. Nothing is learned.

    Args:
        remainder: whether the weight that all keys leave goes to the token's own value; otherwise it is lost.
    """

    has_softmax = False

    def __init__(self, shape: Shape, *, remainder: bool = True, **options: Any) -> None:
        super().__init__(shape, **options)
        self.remainder = remainder

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        return in_blocks(self._block, (q,), (k, v), ctx)

    def _block(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """The attention [B, H, Tq, D] of a block of queries, by the definition; memory grows with Tq x Tk."""
        # No query sees its own key.
        past = ctx.visible() & (ctx.distance > 0)  # [Tq, Tk]
        # In fp32: a weight is a product of as many factors as there are keys.
        with torch.autocast(q.device.type, enabled=False):
            # The weight is b_ij times the product of 1 - b_il over l = j+1..i-1. Since ln b_ij = z_ij + ln (1 - b_ij),
            # its logarithm is z_ij plus the sum of ln (1 - b_il) from key j itself on.
            z = products(q, for_heads_of(q, k), ctx.scale)  # [B, H, Tq, Tk]
            log_left = F.logsigmoid(-z).masked_fill(~past, 0.0)  # ln (1 - b)
            log_weight = z + sums_to_the_end(log_left)
            weight = log_weight.masked_fill(~past, -torch.inf).exp()  # [B, H, Tq, Tk]
            values = exactly(for_heads_of(q, v))  # [B, H, Tk, D]
            out = weight @ values  # [B, H, Tq, D]
            if self.remainder:
                rest = 1 - weight.sum(-1, keepdim=True)  # [B, H, Tq, 1]
                out = out + rest * values[:, :, -q.size(2) :]
        return out.to(v.dtype)
