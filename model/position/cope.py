"""Contextual position encoding: a position is a count of what the query finds relevant, not of tokens."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from model.kernels import choice
from model.kernels import cope as kernels
from model.position.base import Context, PositionEncoding, Shape
from model.position.relative import Relative
from model.position.rotary import Rotary


def cope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    *,
    scale: float,
    visible: Tensor,
    position_q: Tensor | None = None,
    gate_keys: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention with contextual positions, by its definition; memory grows with Tq x Tk.

    With z_ij = scale q_i.k_j the gates are g_ij = sigmoid(z_ij), 0 where key j is not visible; key j's position seen
    from query i is p_ij = sum of g_it for t = j..i, at most P - 1; and q_i.e[p_ij], linear between the entries of
    the table, is added to z_ij.

    Args:
        q: [B, H, Tq, D]. k, v: [B, Hkv, Tk, D], H a multiple of Hkv. table: e, [D, P].
        visible: bool [Tq, Tk], causal.
        position_q: queries of e and of `gate_keys`, [B, H, Tq, D]; default q.
        gate_keys: keys of the gates, [B, Hkv, Tk, D]; default: q and k, so that the gates are sigmoid(z).
        bias: added to the scores, not seen by the gates, [B, H, Tq, Tk].

    Returns:
        [B, H, Tq, D]
    """
    position_q = q if position_q is None else position_q
    logits = gate_logits = _fp32(q @ _for_heads_of(q, k).mT * scale)  # [B, H, Tq, Tk]
    if gate_keys is not None:
        gate_logits = _fp32(position_q @ _for_heads_of(q, gate_keys).mT * scale)
    last = table.size(1) - 1
    position = contextual_positions(gate_logits, visible).clamp(max=last)
    # floor and floor + 1, not floor and ceil: where p is an integer those coincide, and the gates lose their gradient.
    low = position.floor().long()
    at_table = _fp32(position_q @ table.to(q.dtype))  # [B, H, Tq, P]
    below, above = at_table.gather(-1, low), at_table.gather(-1, (low + 1).clamp(max=last))
    scores = logits + torch.lerp(below, above, position - low)
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).to(v.dtype) @ _for_heads_of(q, v)


def contextual_positions(gate_logits: Tensor, visible: Tensor) -> Tensor:
    """p_ij, the sum of the gates of keys j..i, from the gates' logits [B, H, Tq, Tk]; not clamped."""
    gates = gate_logits.sigmoid().masked_fill(~visible, 0.0)
    return gates.flip(-1).cumsum(-1).flip(-1)


def _for_heads_of(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values `x` [B, Hkv, Tk, D] as [B, H, Tk, D], repeated for the queries' heads that share them."""
    groups = q.size(1) // x.size(1)
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _fp32(x: Tensor) -> Tensor:
    # Positions in fp32 whatever the dtype: bf16 sums over a few hundred gates are whole slots off.
    return x.to(torch.promote_types(x.dtype, torch.float32))


class CoPE(PositionEncoding):
    """CoPE (arXiv 2405.18719). The heads of a layer share its table, which starts at zero.

    Args:
        npos_max: entries of the table; positions beyond npos_max - 1 share the last one.
        scaling: "paper": the position term q.e[p] is added to q.k / sqrt(D); "code", the default of the authors'
            released code: it is divided by sqrt(D) too.
        gates: what the query meets in a gate: "keys"; "values"; or "projection", keys of a projection of their own,
            which the cache keeps beside the others.
        shared: one table (and projection) for all layers, instead of one for each.
        every: only the last of every so many layers uses CoPE; the others do without it.

    Raises:
        ValueError: an option out of range, or `shared` together with `every`.
    """

    per_layer = True

    def __init__(
        self,
        shape: Shape,
        *,
        npos_max: int = 64,
        scaling: Literal["paper", "code"] = "paper",
        gates: Literal["keys", "projection", "values"] = "keys",
        shared: bool = False,
        every: int = 1,
        **other: Any,
    ) -> None:
        super().__init__(shape, **other)
        if npos_max < 1:
            raise ValueError(f"pe.npos_max={npos_max} must be at least 1")
        if scaling not in ("paper", "code"):
            raise ValueError(f"pe.scaling={scaling!r} must be 'paper' or 'code'")
        if gates not in ("keys", "projection", "values"):
            raise ValueError(f"pe.gates={gates!r} must be 'keys', 'projection' or 'values'")
        if every < 1:
            raise ValueError(f"pe.every={every} must be at least 1")
        if shape.n_layer is not None and every > shape.n_layer:
            raise ValueError(f"pe.every={every} must be at most model.n_layer={shape.n_layer}, or no layer uses CoPE")
        if shared and every > 1:
            raise ValueError(f"pe.every={every} skips layers, pe.shared=true treats all alike: choose one of them")
        self.npos_max, self.scaling, self.gates, self.every = npos_max, scaling, gates, every
        self.per_layer = not shared
        self.has_cope = (shape.layer + 1) % every == 0  # a layer without CoPE has no parameters of it
        if self.has_cope:
            self.table = nn.Parameter(torch.zeros(shape.head_dim, npos_max))
        if self.has_cope and gates == "projection":
            n_kv_head = shape.n_kv_head or shape.n_head
            self.gate_projection = nn.Parameter(torch.zeros(n_kv_head, shape.head_dim, shape.dim))
        # Sums over forwards. Without dimensions they join any device, and as tensors they are no constants to
        # torch.compile.
        self.clamped = torch.zeros((), device="cpu")
        self.forwards = torch.zeros((), device="cpu")

    def reset_parameters(self, generator: torch.Generator) -> None:
        """The table at zero; the projection as `nn.Linear` starts, uniform within dim^-1/2."""
        if self.has_cope:
            nn.init.zeros_(self.table)
        if self.has_cope and self.gates == "projection":
            shape = self.gate_projection.shape
            bound = shape[-1] ** -0.5
            self.gate_projection.copy_(torch.empty(shape).uniform_(-bound, bound, generator=generator))

    def cached_keys(self, k: Tensor, x: Tensor) -> Tensor:
        if not self.has_cope or self.gates != "projection":
            return k
        return torch.cat((k, (x[:, None] @ self.gate_projection.mT).to(k.dtype)), dim=-1)  # [B, Hkv, T, 2 D]

    def position_query(self, q: Tensor, ctx: Context) -> Tensor | None:
        """The queries that positions and gates of their own are made with, where they are not those of q.k."""
        return None

    def other_bias(self, q: Tensor, ctx: Context) -> Tensor | None:
        """What another encoding adds to the scores, [B, H, Tq, Tk]."""
        return None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        if not self.has_cope:
            return super().attention(q, k, v, ctx)
        k, *projected = k.split(self.head_dim, dim=-1)  # [B, Hkv, Tk, D]
        gate_keys = v if self.gates == "values" else projected[0] if projected else None
        position_q = self.position_query(q, ctx)
        if not self.training and q.size(2) > 1:
            gate_q = q if gate_keys is None or position_q is None else position_q
            self.clamped = self.clamped + self._clamped_share(gate_q, k if gate_keys is None else gate_keys, ctx)
            self.forwards = self.forwards + 1
        table = self.table if self.scaling == "paper" else self.table * ctx.scale
        bias = self.other_bias(q, ctx)
        if ctx.causal and bias is None:
            return kernels.cope_attention(q, k, v, table, scale=ctx.scale, position_q=position_q, gate_keys=gate_keys)
        visible = ctx.pos_q[:, None] >= ctx.pos_k[None, :]
        return cope_attention(
            q, k, v, table, scale=ctx.scale, visible=visible, position_q=position_q, gate_keys=gate_keys, bias=bias
        )

    def describe(self) -> list[str]:
        """Which way the attention takes. A cached text is read by the definition, whose memory is Tq x Tk."""
        which = f"position encoding: {type(self).__name__}" + (
            f" in every {self.every}. layer" if self.every > 1 else ""
        )
        if not self.linear_memory:
            way = "scores of T x T in memory: the relative embeddings' bias has no faster kernel"
        else:
            device = next(self.parameters(), self.clamped).device
            mixed = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if mixed else torch.float32
            kernel, why = choice.kernel_for(device, dtype, self.head_dim, gate_keys=self.gates != "keys")
            name = {"triton": "the Triton kernel", "torch": "the kernel in PyTorch"}[kernel]
            way = f"attention in memory linear in the length by {name} ({why})"
        return [f"{which}; {way}", *super().describe()]

    @torch.no_grad()
    def _clamped_share(self, gate_q: Tensor, gate_k: Tensor, ctx: Context) -> Tensor:
        """Share of the visible pairs whose position is the table's last or beyond, seen by 64 evenly spaced queries:
        enough for a share, and memory stays linear in the length."""
        rows = ((torch.arange(64, device=gate_q.device) + 1) * gate_q.size(2) + 63) // 64 - 1
        visible = ctx.pos_q[rows, None] >= ctx.pos_k[None, :]  # [64, Tk]
        gate_q = gate_q[:, :, rows]  # [B, H, 64, D]
        position = contextual_positions(_fp32(gate_q @ _for_heads_of(gate_q, gate_k).mT * ctx.scale), visible)
        clamped = (position >= self.npos_max - 1) & visible
        return clamped.sum(dtype=torch.float32) / (visible.sum() * gate_q.size(0) * gate_q.size(1))

    def metrics(self) -> dict[str, Tensor]:
        clamped, forwards = self.clamped, self.forwards
        self.clamped, self.forwards = torch.zeros((), device="cpu"), torch.zeros((), device="cpu")
        return {"clamped_share": clamped / forwards} if forwards > 0 else {}


class RotaryCoPE(CoPE, Rotary):
    """CoPE and RoPE: the rotation acts on q.k, and so on gates made of it; whatever else CoPE makes of a query, it
    makes of the query before its rotation, which would give it the absolute position.

    The paper reports the combination, its released code lacks it. Layers without CoPE (`every`) have RoPE alone.
    """

    def position_query(self, q: Tensor, ctx: Context) -> Tensor:
        cos, sin = ctx.rot_q
        return self.rotate(q, (cos, -sin))  # back


class RelativeCoPE(CoPE, Relative):
    """CoPE and relative embeddings, both added to q.k, of which the gates see neither.

    Layers without CoPE (`every`) have the relative embeddings alone, as in the released code. With `shared` all
    layers share these too.
    """

    linear_memory = False

    def other_bias(self, q: Tensor, ctx: Context) -> Tensor:
        return self.relative_bias(q, ctx)

    def reset_parameters(self, generator: torch.Generator) -> None:
        CoPE.reset_parameters(self, generator)
        Relative.reset_parameters(self, generator)
