"""Contextual position encoding: a position is a count of what the query finds relevant, not of tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import exactly, for_heads_of, has_kernel, hide, in_blocks, seen_keys, softmax
from model.position.base import Context, Count, PositionEncoding, Shape
from model.position.ops import reset_as_linear, sums_to_the_end
from model.position.relative import Relative
from model.position.rotary import Rotary


def by_definition(logits: Tensor, at_table: Tensor, gate_logits: Tensor | None, visible: Tensor) -> Tensor:
    """Add the position term to logits.

    Args:
        logits: [B, H, Tq, Tk].
        at_table: q_i.e[n] for each entry n of the table, [B, H, Tq, P].
        gate_logits: [B, H, Tq, Tk]; default `logits`.
        visible: bool [Tq, Tk], causal.

    Returns:
        [B, H, Tq, Tk], -inf where a key is not visible.
    """
    if gate_logits is None:
        gate_logits = logits
    last = at_table.size(-1) - 1
    position = contextual_positions(gate_logits, visible).clamp(max=last)  # [B, H, Tq, Tk]
    # Between floor and floor + 1, not floor and ceil: these coincide at whole positions, where the gates would get no
    # gradient.
    low = position.floor().long()
    at_low = at_table.gather(-1, low)
    at_high = at_table.gather(-1, (low + 1).clamp(max=last))
    term = torch.lerp(at_low, at_high, position - low)
    return (logits + term).masked_fill(~visible, -torch.inf)


def contextual_positions(gate_logits: Tensor, visible: Tensor) -> Tensor:
    """Positions p_ij, sums of the gates of keys j..i, from the logits of the gates; [B, H, Tq, Tk], not clamped."""
    gates = gate_logits.sigmoid().masked_fill(~visible, 0.0)
    return sums_to_the_end(gates)


class AddPositions(torch.autograd.Function):
    """The same as `by_definition`, in half the time: written into `logits`, with the gradient by hand."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, at_table: Tensor, gate_logits: Tensor | None, visible: Tensor) -> Tensor:
        queries, keys = logits.shape[-2:]
        last = at_table.size(-1) - 1
        hide(logits, visible)
        # A gate whose logit is -inf is closed: those of hidden keys.
        source = logits  # of the gates
        if gate_logits is not None:
            source = gate_logits.masked_fill(~visible, -torch.inf)

        # Far back, where every query has counted up to the last position, all keys have that position and need no
        # gates. So gates are computed for the newest `span` keys: at first enough for gates of one half, then more
        # until all queries have reached the last position. On a GPU all keys get gates, since a look at the sums would
        # wait for the device.
        span = keys if logits.is_cuda else queries + 3 * last
        while True:
            near = slice(max(0, keys - span), keys)
            gates = source[..., near].sigmoid()  # [B, H, Tq, span or Tk]
            if span >= keys or (gates[..., :-queries].sum(-1) >= last).all():
                break
            span *= 4

        position = sums_to_the_end(gates).clamp_(max=last)
        low = position.long()
        rest = position.frac_()  # in place: `position` is not needed any more
        slope = F.pad(at_table.diff(dim=-1), (0, 1)).gather(-1, low)  # 0 at the last entry
        logits[..., near].add_(at_table.gather(-1, low)).addcmul_(rest, slope)
        logits[..., : near.start] += at_table[..., -1:]  # far keys
        ctx.mark_dirty(logits)
        ctx.save_for_backward(gates, low, rest, slope)
        ctx.table_shape = at_table.shape
        ctx.has_gate_logits = gate_logits is not None
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gates, low, rest, slope = ctx.saved_tensors
        (grad,) = grads  # [B, H, Tq, Tk]
        past = grad.size(-1) - gates.size(-1)  # keys without gates
        far, near = grad.tensor_split([past], dim=-1)

        # The term is e[low] + rest (e[low + 1] - e[low]), where e is short for q.e. Its gradient goes to entry `low`,
        # and a share `rest` of it moves on from there to the next entry. Far keys have the last entry.
        of_table, of_slopes = grad.new_zeros(2, *ctx.table_shape)
        of_table.scatter_add_(-1, low, near)
        of_slopes.scatter_add_(-1, low, rest.mul_(near))
        of_table[..., :-1] -= of_slopes[..., :-1]
        of_table[..., 1:] += of_slopes[..., :-1]
        of_table[..., -1] += far.sum(-1)

        # A gate is part of the positions of its own key and all keys before it, so its gradient is the sum of theirs.
        # The derivative of a sigmoid g is g - g^2.
        of_positions = slope.mul_(near)
        of_gates = of_positions.cumsum(-1).mul_(gates.addcmul_(gates, gates, value=-1))
        if ctx.has_gate_logits:
            return grad, of_table, F.pad(of_gates, (past, 0)), None
        of_logits = of_gates.add_(near)  # the logits are scores and the logits of the gates, too
        if past > 0:
            of_logits = torch.cat((far, of_logits), dim=-1)
        return of_logits, of_table, None, None


def cope_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, *, scale: float, visible: Tensor, position_q: Tensor | None = None,
    gate_keys: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
    add_positions: Callable[..., Tensor] = by_definition,
) -> Tensor:  # fmt: skip
    """Compute attention with contextual positions, by its definition; memory grows with Tq x Tk.

    With z_ij = scale q_i.k_j the gates are g_ij = sigmoid(z_ij), and 0 where key j is not visible. The position of
    key j as seen from query i is p_ij, the sum of g_it over t = j..i, at most P - 1. The term q_i.e[p_ij] is added to
    z_ij, where e is linear between the entries of the table.

    Args:
        q: [B, H, Tq, D].
        k, v: [B, Hkv, Tk, D], H a multiple of Hkv.
        table: e, [D, P].
        visible: bool [Tq, Tk], causal.
        position_q: queries that meet e and `gate_keys`, [B, H, Tq, D]; default q.
        gate_keys: keys of the gates, [B, Hkv, Tk, D]; default: q and k, so that the gates are sigmoid(z).
        bias: added to the scores, not seen by the gates, [H, Tq, Tk] or [B, H, Tq, Tk].
        sinks: see `model.attention.softmax`.
        add_positions: `by_definition`, or `AddPositions.apply`, which is faster.

    Returns:
        [B, H, Tq, D].
    """
    if position_q is None:
        position_q = q
    logits = (q * scale) @ for_heads_of(q, k).mT  # [B, H, Tq, Tk]

    gate_logits = None
    if gate_keys is not None:
        gate_logits = (position_q * scale) @ for_heads_of(q, gate_keys).mT  # [B, H, Tq, Tk]
    # The logits may be overwritten here: nothing reads them afterwards.
    scores = add_positions(logits, position_q @ table, gate_logits, visible)
    if bias is not None:
        scores = scores + bias
    return softmax(scores, sinks) @ for_heads_of(q, v)


class CoPE(PositionEncoding):
    """CoPE (arXiv 2405.18719): a position is a count of the gates between key and query, and so depends on content.

    The position p adds q.e[p] to the score: see `cope_attention`. The heads of a layer share its `table`
    [D, npos_max], which starts at zero.

    Args:
        npos_max: entries of the table; positions beyond npos_max - 1 share the last one.
        scaling: "paper": the position term q.e[p] is added to q.k / sqrt(D); "code", as in the authors' released code:
            it is divided by sqrt(D) too.
        gates: what the query is multiplied by in a gate: "keys", "values", or "projection": keys of the gates' own, by
            `gate_projection` [Hkv, D, dim].
        shared: one table (and projection) for all layers, instead of one for each.
    """

    in_place = True
    kernels = "lab.kernels.cope"

    def __init__(
        self, shape: Shape, *, npos_max: Count = 64, scaling: Literal["paper", "code"] = "paper",
        gates: Literal["keys", "projection", "values"] = "keys", shared: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, **options)
        self.npos_max = npos_max
        self.scaling = scaling
        self.gates = gates
        self.shared = shared
        self.table = nn.Parameter(torch.zeros(shape.head_dim, npos_max))
        if gates == "projection":
            self.gate_projection = nn.Parameter(torch.zeros(shape.n_kv_head, shape.head_dim, shape.dim))
            self.decayed = ("gate_projection",)
        self._reset_metrics()

    def _reset_metrics(self) -> None:
        # Sums over forward passes. Tensors, since torch.compile would take numbers as constants and compile again for
        # each new value; without dimensions, since such tensors on the CPU combine with those of any device.
        self.clamped = torch.zeros((), device="cpu")
        self.forwards = torch.zeros((), device="cpu")

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start the table at zero, and the projection as `nn.Linear` starts."""
        nn.init.zeros_(self.table)
        if self.gates == "projection":
            reset_as_linear(self.gate_projection, generator)
        super().reset_parameters(generator)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """The keys of the gates, [B, T, Hkv, D], if they have a projection of their own."""
        if self.gates != "projection":
            return {}
        projected = x @ self.gate_projection.flatten(0, 1).mT  # [B, T, Hkv D]
        return {"gate_keys": projected.unflatten(-1, (-1, self.head_dim))}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        position_q = q  # not rotated: a rotation would give it the absolute position
        q, k = self.rotate(q, k, ctx)
        # Gates made of q.k include the rotation, if there is one; others do not.
        if self.gates == "keys":
            gate_q, gate_keys = q, k
        elif self.gates == "values":
            gate_q, gate_keys = position_q, v
        else:
            gate_q, gate_keys = position_q, state["gate_keys"].transpose(1, 2)  # [B, Hkv, Tk, D]
        # For `metrics`, in evaluations alone, and not for each token of a generation.
        if not self.training and q.size(2) > 1:
            self.clamped = self.clamped + self._clamped_share(gate_q, gate_keys, ctx)
            self.forwards = self.forwards + 1
        table = self.table if self.scaling == "paper" else self.table * ctx.scale
        if self.bias is None and has_kernel(q, ctx, gaps=True):
            from lab.kernels import cope as cope_kernels  # needs Triton, which only comes with PyTorch for GPUs

            first, last = seen_keys(q, ctx)
            return cope_kernels.cope(
                q, k, v, table, first, last,
                scale=ctx.scale,
                position_q=position_q,
                gate_keys=None if self.gates == "keys" else gate_keys,
                sinks=ctx.sinks,
            )  # fmt: skip
        add_positions = by_definition if torch.compiler.is_compiling() else AddPositions.apply

        def block(q: Tensor, position_q: Tensor, k: Tensor, v: Tensor, gate_keys: Tensor, ctx: Context) -> Tensor:
            return cope_attention(
                q, k, v, table,
                scale=ctx.scale,
                visible=ctx.visible(),
                position_q=position_q,
                gate_keys=None if self.gates == "keys" else gate_keys,
                bias=self.bias(position_q, ctx) if self.bias is not None else None,
                sinks=ctx.sinks,
                add_positions=add_positions,
            )  # fmt: skip

        # All in fp32: in bf16 the sum of a few hundred gates would be off by whole positions.
        with torch.autocast(q.device.type, enabled=False):
            table = exactly(table)
            queries = [exactly(q), exactly(position_q)]
            keys = [exactly(k), exactly(v), exactly(gate_keys)]
            return in_blocks(block, queries, keys, ctx).to(v.dtype)

    @torch.no_grad()
    def _clamped_share(self, gate_q: Tensor, gate_keys: Tensor, ctx: Context) -> Tensor:
        """Share of the visible pairs at the last position of the table or beyond, among 64 evenly spaced queries."""
        # The last query of each of 64 equal parts of the text. Of fewer than 64 queries some count more than once.
        parts = torch.arange(64, device=gate_q.device) + 1
        rows = (parts * gate_q.size(2) + 63) // 64 - 1  # [64]
        visible = replace(ctx, pos_q=ctx.pos_q[rows]).visible()  # [64, Tk]
        if ctx.places is not None:
            first = ctx.places.first[:, None, rows, None]  # [B, 1, 64, 1]
            visible = visible & (ctx.pos_k >= first)  # [B, 1, 64, Tk]
        keys = for_heads_of(gate_q, gate_keys)
        gate_logits = gate_q[:, :, rows] @ keys.mT * ctx.scale  # [B, H, 64, Tk]
        position = contextual_positions(exactly(gate_logits), visible)
        clamped = (position >= self.npos_max - 1) & visible
        return clamped.float().mean() / visible.float().mean()

    def metrics(self) -> dict[str, Tensor]:
        """Share of the pairs at the last position of the table or beyond; if it is large, npos_max is too small."""
        clamped = self.clamped
        forwards = self.forwards
        self._reset_metrics()
        if forwards == 0:
            return {}
        return {"clamped_share": clamped / forwards}


class RotaryCoPE(Rotary, CoPE):
    """CoPE and RoPE: the rotation acts on q.k, and so on gates made of it.

    The position term and all other gates use the query before its rotation. The paper reports this combination; its
    released code lacks it.
    """

    family = "CoPE and RoPE"
    in_place = True

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        if self.values and self.gates == "values":
            raise ValueError("pe.values=true with pe.gates=values: gates would depend on absolute positions; drop one")


class RelativeCoPE(CoPE, Relative):
    """CoPE and relative embeddings. Both terms are added to q.k, and no gate contains them.

    With `shared` all layers share both tables.
    """
