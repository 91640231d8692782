"""Additive biases: a score changes with the distance between query and key, by a function of its own for each head."""

import math
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.attention import BLOCK, attention, in_blocks, sdpa
from model.position.base import Context, Count, PositionEncoding, Positive, Shape
from model.position.ops import bounded, shifted

Even = Annotated[int, Field(ge=2, multiple_of=2)]


class KeyBias(PositionEncoding):
    """Base of biases that are a number of the key less one of the query; a softmax does not notice the query's.

    The number of the key becomes a few more channels of queries and keys, and all is plain attention. In 16 bit three
    channels hold it to the precision of fp32.
    """

    def key_bias(self, state: dict[str, Tensor], ctx: Context) -> Tensor:
        """What is added to the scores of each key, but for a constant: [B or 1, Tk, H], fp32 or better."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        q, k = self.rotate(q, k, ctx)
        bias = self.key_bias(state, ctx).transpose(1, 2)  # [B or 1, H, Tk]
        windowed = self.window is not None and (ctx.has_gaps or self.window < k.size(2))
        if windowed or ctx.sinks is not None:  # differences in a window are small; a sink notices the query's number
            return in_blocks(self._block, (q,), (k, v, bias), ctx, window=self.window)
        bias = bias - bias[:, :, k.size(2) - q.size(2), None]  # from the first query on, so small where it decides
        groups = self.n_head // self.n_kv_head
        unit = 2.0 ** round(-math.log2(ctx.scale))  # close to 1 / scale, and exact in every dtype
        left = bias.float().unflatten(1, (self.n_kv_head, groups)).transpose(2, 3) / (ctx.scale * unit)
        parts = []  # of which the sum is `left` [B or 1, Hkv, Tk, groups]
        for _ in range(1 if k.element_size() > 2 else 3):
            parts.append(left.to(k.dtype))
            left = left - parts[-1]
        of_keys = torch.cat(parts, dim=-1)
        own = torch.eye(groups, dtype=q.dtype, device=q.device).repeat(self.n_kv_head, len(parts)) * unit  # [H, extra]
        extra = of_keys.size(-1)
        room = -extra % 8  # fused kernels want multiples of 8
        q = torch.cat((q, F.pad(own, (0, room))[None, :, None].expand(*q.shape[:3], -1)), dim=-1)
        k = torch.cat((k, F.pad(of_keys, (0, room)).expand(k.size(0), -1, -1, -1)), dim=-1)
        return attention(q, k, F.pad(v, (0, extra + room)), ctx)[..., : self.head_dim]

    def _block(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, ctx: Context) -> Tensor:
        lost = (bias[:, :, None] - bias[:, :, -q.size(2) :, None]).float()  # [B or 1, H, Tq, Tk]
        return sdpa(q, k, v, scale=ctx.scale, sinks=ctx.sinks, visible=ctx.visible(self.window), bias=lost)


class ALiBi(KeyBias):
    """ALiBi (arXiv 2108.12409): -m_h (i - j); the slopes m_h are not learned."""

    def slopes(self, device: torch.device) -> Tensor:
        """m_h, fp32 [H]: 2^(-8h/H) for h = 1..H. Where H is not a power of two, as the paper's authors chose: those of
        the power of two below it, followed by every second one of the next."""
        below = 2 ** math.floor(math.log2(self.n_head))
        h = torch.arange(1, below + 1, dtype=torch.float32, device=device)  # made there: a copy would wait for it
        return torch.cat((2 ** (-8 * h / below), 2 ** (-4 * (2 * h - 1) / below)))[: self.n_head]

    def tables(self, pos: Tensor, length: int) -> Tensor:
        """m_h j, [length, H] in fp32; j counts from the first key, so that no shift of all positions is noticed."""
        return (pos - pos[0])[:, None] * self.slopes(pos.device)

    def key_bias(self, state: dict[str, Tensor], ctx: Context) -> Tensor:
        return ctx.tables[None, -ctx.pos_k.size(0) :]


class NAPE(ALiBi):
    """ALiBi with slopes 1/h in the first half of the heads, no encoding in the others (arXiv 2506.16640)."""

    def slopes(self, device: torch.device) -> Tensor:
        h = torch.arange(1, self.n_head + 1, dtype=torch.float32, device=device)
        return torch.where(h <= self.n_head // 2, 1 / h, 0.0)


class DistanceBias(PositionEncoding):
    """Base of biases that depend on the distance only: all layers share them, and one row holds them for a text."""

    shared = True

    def at(self, distance: Tensor) -> Tensor:
        """The bias fp32 [H, n] at the distances int64 [n]."""
        raise NotImplementedError

    def tables(self, pos: Tensor, length: int) -> Tensor:
        """The bias at the distances length - 1, .., 0, then zeros for the future: [H, length + BLOCK]."""
        return F.pad(self.at(pos.flip(0) - pos[0]), (0, BLOCK))

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        if ctx.has_gaps:
            return self.at(ctx.distance.clamp(min=0).flatten()).unflatten(1, ctx.distance.shape)
        queries, keys = q.size(2), ctx.pos_k.size(0)
        start = ctx.length - keys
        rows = ctx.tables[:, None, start : start + keys + queries].expand(-1, queries, -1)
        return shifted(rows, keys)  # [H, Tq, Tk]


class T5(DistanceBias):
    """T5's relative bias (arXiv 1910.10683): a learned scalar for each head and bucket of distances.

    Half of the buckets hold one distance each, the others ranges that grow geometrically, the last one also everything
    from `max_distance` on. The table starts as T5's, normal with std dim^-1/2. The bias is added to q.k / sqrt(D), in
    T5 itself to q.k.
    """

    def __init__(self, shape: Shape, *, num_buckets: Even = 32, max_distance: int = 128, **options: Any) -> None:
        super().__init__(shape, **options)
        if max_distance <= num_buckets // 2:
            raise ValueError(f"pe.max_distance={max_distance} must be more than half of pe.num_buckets={num_buckets}")
        self.max_distance, self.std = max_distance, shape.dim**-0.5
        self.table = nn.Parameter(torch.zeros(num_buckets, shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.table, 0.0, self.std, generator)

    def bucket(self, distance: Tensor) -> Tensor:
        """Index of the bucket of each distance, int64."""
        buckets = self.table.size(0)
        exact = buckets // 2
        share = torch.log(distance.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        return torch.where(distance < exact, distance, (exact + share * exact).long().clamp(max=buckets - 1))

    def at(self, distance: Tensor) -> Tensor:
        return F.embedding(self.bucket(distance), self.table.float()).T


class Kerple(DistanceBias):
    """KERPLE's logarithmic kernel (arXiv 2205.09921): -p ln(1 + a (i - j)), with p and a learned for each head. Both
    are at least 0.01 and start uniform, p in (0, 2) and a in (0, 1)."""

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.p = nn.Parameter(torch.zeros(shape.n_head))
        self.a = nn.Parameter(torch.zeros(shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.uniform_(self.p, 0.0, 2.0, generator)
        nn.init.uniform_(self.a, 0.0, 1.0, generator)

    def at(self, distance: Tensor) -> Tensor:
        p, a = (bounded(x.float(), 0.01)[:, None] for x in (self.p, self.a))  # [H, 1]
        return -p * torch.log1p(a * distance)


class FIRE(PositionEncoding):
    """FIRE (arXiv 2310.04418): a small network f of the distance relative to the length of the text so far,
    f(ln(1 + c (i - j)) / ln(1 + c max(i, L))), with c, L and f learned and shared by all layers.

    i is the query's position in the text, so queries beyond L notice a shift of all positions.

    Args:
        width: units of its hidden layer (ReLU); there is one output for each head.
        init_c: initial c. The greater, the more of the range is given to near tokens.
        init_l: initial L, in tokens.
    """

    shared = True

    def __init__(
        self, shape: Shape, *, width: Count = 32, init_c: Positive = 0.1, init_l: Positive = 512.0, **options: Any
    ) -> None:
        super().__init__(shape, **options)
        self.init_c, self.init_l = init_c, init_l
        self.c = nn.Parameter(torch.zeros(1))
        self.l_multiplier = nn.Parameter(torch.zeros(1))  # of init_l: an optimizer step moves L by a fraction
        self.up_weight = nn.Parameter(torch.zeros(width, 1))
        self.up_bias = nn.Parameter(torch.zeros(width))
        self.down_weight = nn.Parameter(torch.zeros(shape.n_head, width))
        self.down_bias = nn.Parameter(torch.zeros(shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """c and L as given; the network as `nn.Linear` starts, uniform within fan_in^-1/2."""
        nn.init.constant_(self.c, self.init_c)
        nn.init.ones_(self.l_multiplier)
        for weight, bias in ((self.up_weight, self.up_bias), (self.down_weight, self.down_bias)):
            bound = weight.size(1) ** -0.5
            nn.init.uniform_(weight, -bound, bound, generator)
            nn.init.uniform_(bias, -bound, bound, generator)

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # positions need fp32
            c = self.c.float().abs()
            reach = torch.maximum(ctx.pos_q, (self.l_multiplier.float() * self.init_l).abs())  # [Tq]
            x = torch.log1p(c * ctx.distance.clamp(min=0)) / (torch.log1p(c * reach) + 1e-6)[:, None]  # [Tq, Tk]
            up_bias, down_bias = self.up_bias.float()[:, None], self.down_bias.float()[:, None]
            eager_cpu = not (x.is_cuda or torch.compiler.is_compiling())
            out = []
            for part in x.flatten().split(8192 if eager_cpu else x.numel()):  # a hidden layer that fits a core's cache
                hidden = torch.addmm(up_bias, self.up_weight.float(), part[None]).relu_()
                out.append(torch.addmm(down_bias, self.down_weight.float(), hidden))
            return torch.cat(out, dim=1).unflatten(-1, x.shape)  # [H, Tq, Tk]
