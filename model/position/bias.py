"""Additive biases: a score changes with the distance between query and key, by a function of its own for each head."""

import math
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.attention import BLOCK, attention, in_blocks, sdpa
from model.position.base import Context, Count, PositionEncoding, Positive, Shape
from model.position.ops import bounded, reset_as_linear, shifted

Even = Annotated[int, Field(ge=2, multiple_of=2)]


class KeyBias(PositionEncoding):
    """Base of biases of the form b(j) - b(i) for key j and query i; a softmax does not notice the second term.

    So b(j) becomes a few more channels of queries and keys, and all is plain attention, which needs no table of pairs.
    """

    def key_bias(self, state: dict[str, Tensor], ctx: Context) -> Tensor:
        """Return b(j), up to a constant: [B or 1, Tk, H], fp32 or better."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        q, k = self.rotate(q, k, ctx)
        bias = self.key_bias(state, ctx).transpose(1, 2)  # [B or 1, H, Tk]
        # With a window the bias is taken by pairs, since differences within it are small however large b is. And a
        # sink, which is a score without a bias, does notice b(i).
        windowed = ctx.window is not None and (ctx.has_gaps or ctx.window < k.size(2))
        if windowed or ctx.sinks is not None:
            return in_blocks(self._block, (q,), (k, v, bias), ctx)

        # Counted from the first query: small, and so precise, where it decides.
        bias = bias - bias[:, :, k.size(2) - q.size(2), None]
        is_16_bit = k.element_size() == 2
        k_extra, q_extra = self._channels(bias.detach() if is_16_bit else bias, k, ctx.scale)
        extra = k_extra.size(-1)
        long_q = torch.cat((q, q_extra[None, :, None].expand(*q.shape[:3], -1)), dim=-1)
        long_k = torch.cat((k, k_extra.expand(k.size(0), -1, -1, -1)), dim=-1)
        out = attention(long_q, long_k, F.pad(v, (0, extra)), ctx)[..., : self.head_dim]
        if is_16_bit and bias.requires_grad:
            out = ExactBiasGradient.apply(out, q, k, v, bias, ctx)
        return out

    def _channels(self, bias: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Write the bias as a product of channels of keys and queries.

        The heads that share a key have a bias each, so a key gets a channel for each of them, which the query of that
        head multiplies by a constant and the other heads by 0. A number in 16 bit is a sum of three channels, which
        hold it to the precision of fp32: each takes what the ones before left over.

        Args:
            bias: [B or 1, H, Tk].
            k: keys [B, Hkv, Tk, D], whose dtype the channels get.
            scale: what attention multiplies the products by.

        Returns:
            Channels of the keys [B or 1, Hkv, Tk, n] and of the queries [H, n], n a multiple of 8.
        """
        groups = self.n_head // self.n_kv_head
        unit = 2.0 ** round(-math.log2(scale))  # close to 1 / scale, and exact in every dtype
        rest = bias.float().unflatten(1, (self.n_kv_head, groups)).transpose(2, 3)  # [B or 1, Hkv, Tk, groups]
        rest = rest / (scale * unit)
        parts: list[Tensor] = []
        for _ in range(1 if k.element_size() > 2 else 3):
            part = rest.to(k.dtype)
            rest = rest - part
            parts.append(part)
        of_keys = torch.cat(parts, dim=-1)
        of_queries = torch.eye(groups, dtype=k.dtype, device=k.device).repeat(self.n_kv_head, len(parts)) * unit
        unused = -of_keys.size(-1) % 8  # fused kernels want multiples of 8
        return F.pad(of_keys, (0, unused)), F.pad(of_queries, (0, unused))

    def _block(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, ctx: Context) -> Tensor:
        of_queries = bias[:, :, -q.size(2) :]
        by_pair = (bias[:, :, None] - of_queries[..., None]).float()  # [B or 1, H, Tq, Tk]
        return sdpa(q, k, v, scale=ctx.scale, sinks=ctx.sinks, visible=ctx.visible(), bias=by_pair)


class ExactBiasGradient(torch.autograd.Function):
    """The output of causal attention in 16 bit, and the gradient of the keys' bias in fp32.

    A gate sums up the gradients of the biases after it, whose terms nearly cancel: of gradients that are rounded to
    16 bit, as those of a key's channels are, little but noise would be left. So the scores are computed once more, in
    blocks of queries, and what each adds to the bias of a key is summed in fp32.

    Args of `apply`:
        out: the attention, [B, H, T, D], which is returned as it is.
        q, k, v: [B, H, T, D] and twice [B, Hkv, T, D], without the channels of the bias; their gradients are `out`'s.
        bias: what was added to the scores of each key, fp32 or better [B or 1, H, T].
        ctx: the context of the call.
    """

    @staticmethod
    def forward(saved: Any, out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, ctx: Context) -> Tensor:
        saved.save_for_backward(q, k, v, bias)
        saved.scale = ctx.scale
        return out.view_as(out)

    @staticmethod
    def backward(saved: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        q, k, v, bias = saved.saved_tensors
        groups = q.size(1) // k.size(1)
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        n_queries = q.size(2)
        past = k.size(2) - n_queries
        bias_grad = torch.zeros_like(bias, dtype=torch.float32).expand(q.size(0), -1, -1).contiguous()
        with torch.autocast(q.device.type, enabled=False):
            for start in range(0, n_queries, BLOCK):
                stop = min(n_queries, start + BLOCK)
                end = past + stop
                products = q[:, :, start:stop].float() @ k[:, :, :end].float().transpose(2, 3)  # [B, H, tq, tk]
                scores = products * saved.scale + bias[:, :, None, :end].float()
                hidden = torch.ones(stop - start, end, dtype=torch.bool, device=q.device).triu(past + start + 1)
                probabilities = scores.masked_fill(hidden, -math.inf).softmax(-1)
                value_grads = grad_out[:, :, start:stop].float() @ v[:, :, :end].float().transpose(2, 3)
                # The derivative of the softmax: what a score adds beyond the mean over the keys.
                mean = (probabilities * value_grads).sum(-1, keepdim=True)
                bias_grad[:, :, :end] += (probabilities * (value_grads - mean)).sum(2)
        return grad_out, None, None, None, bias_grad.sum_to_size(bias.shape).to(bias.dtype), None


class ALiBi(KeyBias):
    """ALiBi (arXiv 2108.12409): -m_h (i - j); the slopes m_h are not learned.

    Every head prefers near keys, the first ones most.
    """

    def slopes(self, device: torch.device) -> Tensor:
        """m_h, fp32 [H]: 2^(-8h/H) for h = 1..H.

        Where H is not a power of two, as the paper's authors chose: the slopes of the power of two below it, followed
        by every second one of the next.
        """
        below = 2 ** math.floor(math.log2(self.n_head))
        h = torch.arange(1, below + 1, dtype=torch.float32, device=device)  # made there: a copy would wait for it
        slopes = 2 ** (-8 * h / below)
        between = 2 ** (-4 * (2 * h - 1) / below)
        return torch.cat((slopes, between))[: self.n_head]

    def tables(self, pos: Tensor, length: int) -> Tensor:
        """m_h j, [length, H] in fp32; j counts from the first key, so that no shift of all positions is noticed."""
        return (pos - pos[0])[:, None] * self.slopes(pos.device)

    def key_bias(self, state: dict[str, Tensor], ctx: Context) -> Tensor:
        return ctx.tables[None, -ctx.pos_k.size(0) :]


class NAPE(ALiBi):
    """NAPE (arXiv 2506.16640): ALiBi with slopes 1/h in the first half of the heads, no encoding in the others.

    Nothing is learned.
    """

    def slopes(self, device: torch.device) -> Tensor:
        h = torch.arange(1, self.n_head + 1, dtype=torch.float32, device=device)
        return torch.where(h <= self.n_head // 2, 1 / h, 0.0)


class DistanceBias(PositionEncoding):
    """Base of biases that depend on the distance only: all layers share them, and one row holds them for a text."""

    shared = True

    def at(self, distance: Tensor) -> Tensor:
        """Return the bias, fp32 [H, n], at the distances int64 [n]."""
        raise NotImplementedError

    def tables(self, pos: Tensor, length: int) -> Tensor:
        """The bias at the distances length - 1, .., 0, then zeros for the future: [H, length + BLOCK]."""
        return F.pad(self.at(pos.flip(0) - pos[0]), (0, BLOCK))

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        if ctx.has_gaps:
            return self.at(ctx.distance.clamp(min=0).flatten()).unflatten(1, ctx.distance.shape)
        # The last query's row of distances keys - 1, .., 0 is the end of the table, with zeros for the future.
        queries, keys = q.size(2), ctx.pos_k.size(0)
        start = ctx.length - keys
        row = ctx.tables[:, None, start : start + keys + queries]
        return shifted(row.expand(-1, queries, -1), keys)  # [H, Tq, Tk]


class T5(DistanceBias):
    """T5's relative bias (arXiv 1910.10683): a learned scalar for each head and bucket of distances, `table`
    [num_buckets, H].

    Half of the buckets hold one distance each, the others ranges that grow geometrically, the last one also everything
    from `max_distance` on. The table starts as T5's, normal with std dim^-1/2. The bias is added to q.k / sqrt(D), in
    T5 itself to q.k.
    """

    def __init__(self, shape: Shape, *, num_buckets: Even = 32, max_distance: int = 128, **options: Any) -> None:
        super().__init__(shape, **options)
        if max_distance <= num_buckets // 2:
            raise ValueError(f"pe.max_distance={max_distance} must be more than half of pe.num_buckets={num_buckets}")
        self.max_distance = max_distance
        self.std = shape.dim**-0.5
        self.table = nn.Parameter(torch.zeros(num_buckets, shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.table, 0.0, self.std, generator)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the index of the bucket of each distance, int64 of the same shape."""
        buckets = self.table.size(0)
        exact = buckets // 2  # buckets of one distance each
        # How far along the logarithmic half a distance is: 0 at its first one, 1 at max_distance.
        share = torch.log(distance.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        ranges = (exact + share * exact).long().clamp(max=buckets - 1)
        return torch.where(distance < exact, distance, ranges)

    def at(self, distance: Tensor) -> Tensor:
        return F.embedding(self.bucket(distance), self.table.float()).T


class Kerple(DistanceBias):
    """KERPLE's logarithmic kernel (arXiv 2205.09921): -p ln(1 + a (i - j)), a bias that falls ever more slowly.

    `p` [H] and `a` [H] are learned. Both are at least 0.01 and start uniform, p in (0, 2) and a in (0, 1).
    """

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.p = nn.Parameter(torch.zeros(shape.n_head))
        self.a = nn.Parameter(torch.zeros(shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.uniform_(self.p, 0.0, 2.0, generator)
        nn.init.uniform_(self.a, 0.0, 1.0, generator)

    def at(self, distance: Tensor) -> Tensor:
        p = bounded(self.p.float(), 0.01)[:, None]  # [H, 1]
        a = bounded(self.a.float(), 0.01)[:, None]
        return -p * torch.log1p(a * distance)


class FIRE(PositionEncoding):
    """FIRE (arXiv 2310.04418): a small network f of the distance relative to the length of the text so far,
    f(ln(1 + c (i - j)) / ln(1 + c max(i, L))), with c, L and f learned and shared by all layers.

    i is the query's position in the text, so queries beyond L notice a shift of all positions. f has one hidden layer,
    `up_weight` [width, 1] and `down_weight` [H, width] with their biases.

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
        self.init_c = init_c
        self.init_l = init_l
        self.c = nn.Parameter(torch.zeros(1))
        self.l_multiplier = nn.Parameter(torch.zeros(1))  # of init_l: an optimizer step moves L by a fraction
        self.up_weight = nn.Parameter(torch.zeros(width, 1))
        self.up_bias = nn.Parameter(torch.zeros(width))
        self.down_weight = nn.Parameter(torch.zeros(shape.n_head, width))
        self.down_bias = nn.Parameter(torch.zeros(shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """c and L as given; the network as `nn.Linear` starts."""
        nn.init.constant_(self.c, self.init_c)
        nn.init.ones_(self.l_multiplier)
        reset_as_linear(self.up_weight, generator, self.up_bias)
        reset_as_linear(self.down_weight, generator, self.down_bias)

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # positions need fp32
            c = self.c.float().abs()
            threshold = (self.l_multiplier.float() * self.init_l).abs()  # L
            reach = torch.log1p(c * torch.maximum(ctx.pos_q, threshold))  # [Tq]
            x = torch.log1p(c * ctx.distance.clamp(min=0)) / (reach + 1e-6)[:, None]  # [Tq, Tk]
            return self._network(x.flatten()).unflatten(-1, x.shape)  # [H, Tq, Tk]

    def _network(self, x: Tensor) -> Tensor:
        """Apply f to numbers x, fp32 [n]: [H, n]."""
        up_bias = self.up_bias.float()[:, None]
        down_bias = self.down_bias.float()[:, None]
        # The hidden layer is `width` times as large as the scores. Where nothing fuses it away, on a CPU without a
        # compiler, it is computed in parts that fit a core's cache.
        size = x.numel()
        if not (x.is_cuda or torch.compiler.is_compiling()):
            size = 8192
        out = []
        for part in x.split(size):
            hidden = torch.addmm(up_bias, self.up_weight.float(), part[None]).relu_()  # [width, part]
            out.append(torch.addmm(down_bias, self.down_weight.float(), hidden))
        return torch.cat(out, dim=1)
