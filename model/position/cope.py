"""Contextual position encoding: a position is a count of what the query finds relevant, not of tokens."""

import torch
from torch import Tensor, nn

from model.position.base import Context, PositionEncoding, Shape


def cope_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, *, scale: float, visible: Tensor) -> Tensor:
    """Attention with contextual positions, by its definition; memory grows with Tq x Tk.

    With z_ij = scale q_i.k_j the gates are g_ij = sigmoid(z_ij), 0 where key j is not visible; key j's position seen
    from query i is p_ij = sum of g_it for t = j..i, at most P - 1; and q_i.e[p_ij], linear between the entries of
    the table, is added to z_ij.

    Args:
        q: [B, H, Tq, D]. k, v: [B, H, Tk, D]. table: e, [D, P].
        visible: bool [Tq, Tk], causal.

    Returns:
        [B, H, Tq, D]
    """
    last = table.size(1) - 1
    logits = (q @ k.mT * scale).float()  # [B, H, Tq, Tk]
    gates = logits.sigmoid().masked_fill(~visible, 0.0)
    # Positions in fp32 whatever the dtype: bf16 sums over a few hundred gates are whole slots off.
    position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=last)
    # floor and floor + 1, not floor and ceil: where p is an integer those coincide, and the gates lose their gradient.
    low = position.floor().clamp(max=max(last - 1, 0))
    weight = position - low
    at_table = (q @ table.to(q.dtype)).float()  # [B, H, Tq, P]
    index = low.long()
    bias = torch.lerp(at_table.gather(-1, index), at_table.gather(-1, (index + 1).clamp(max=last)), weight)
    scores = (logits + bias).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


class CoPE(PositionEncoding):
    """CoPE (arXiv 2405.18719), with gates from the keys and one table for each layer, shared by its heads.

    Args:
        npos_max: entries of the table; positions beyond npos_max - 1 share the last one.
    """

    per_layer = True

    def __init__(self, shape: Shape, *, npos_max: int = 64) -> None:
        super().__init__(shape)
        if npos_max < 1:
            raise ValueError(f"pe.npos_max={npos_max} must be at least 1")
        self.table = nn.Parameter(torch.zeros(shape.head_dim, npos_max))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.table)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        groups = q.size(1) // k.size(1)
        k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
        visible = ctx.pos_q[:, None] >= ctx.pos_k[None, :]
        return cope_attention(q, k, v, self.table, scale=ctx.scale, visible=visible)
