"""Additive biases: each head adds a function of its own of the distance between query and key to their score."""

import math
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.attention import BLOCK, attention, exactly, flash, has_kernel, in_blocks, sdpa, seen_keys
from model.position.base import Context, Count, PositionEncoding, Positive, Shape, overrides
from model.position.ops import bounded, reset_as_linear, shifted, without_low_bits

Even = Annotated[int, Field(ge=2, multiple_of=2)]


class KeyBias(PositionEncoding):
    """Base of biases of the form b(j) - b(i) for key j and query i.

    The softmax of query i is the same without b(i). And b(j) can be written as a few more channels of queries and keys,
    so that plain attention computes it all, without a table of all pairs.
    """

    def key_bias(self, state: dict[str, Tensor], ctx: Context) -> Tensor:
        """Return b(j), up to a constant: [B or 1, Tk, H], fp32 or better."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        q, k = self.rotate(q, k, ctx)
        bias = self.key_bias(state, ctx).transpose(1, 2)  # [B or 1, H, Tk]
        if has_kernel(q, ctx, gaps=True):
            return flash(q, k, v, ctx, keys=bias)
        # With a window the bias is computed for each pair: within the window differences are small and precise, however
        # large b has become. With a sink b(i) matters, since the score of a sink has no bias.
        windowed = ctx.window is not None and (ctx.has_gaps or ctx.window < k.size(2))
        if windowed or ctx.sinks is not None:
            return in_blocks(self._block, (q,), (k, v, bias), ctx)

        # Relative to b of the first query, b(j) is small, and so precise, for the near keys, whose weights are large.
        bias = bias - bias[:, :, k.size(2) - q.size(2), None]
        # Channels of 16 bit have gradients of 16 bit, too coarse for a bias that is learned: it gets its own below.
        is_16_bit = k.element_size() == 2
        k_extra, q_extra = self._channels(bias.detach() if is_16_bit else bias, k, ctx.scale)
        q_extra = q_extra[None, :, None].expand(*q.shape[:3], -1)  # [B, H, Tq, extra]
        k_extra = k_extra.expand(k.size(0), -1, -1, -1)  # [B, Hkv, Tk, extra]

        # The products of these channels add the bias to the scores within one fused kernel.
        long_q = torch.cat((q, q_extra), dim=-1)
        long_k = torch.cat((k, k_extra), dim=-1)
        long_v = F.pad(v, (0, k_extra.size(-1)))
        out = attention(long_q, long_k, long_v, ctx)[..., : self.head_dim]  # [B, H, Tq, D]

        if is_16_bit and bias.requires_grad:
            out = ExactBiasGradient.apply(out, q, k, v, bias, ctx)
        return out

    def _channels(self, bias: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Write the bias as a product of channels of keys and queries.

        Each of the heads that share a key has its own bias. So a key gets one channel for each of them, which is
        multiplied by a constant in the queries of that head and by 0 in those of the others. Where channels are 16 bit,
        three of them hold one number to the precision of fp32: each holds the first bits that those before it do not.

        Args:
            bias: [B or 1, H, Tk].
            k: keys [B, Hkv, Tk, D], whose dtype the channels get.
            scale: the factor by which attention multiplies dot products.

        Returns:
            Channels of the keys [B or 1, Hkv, Tk, n] and of the queries [H, n], n a multiple of 8.
        """
        groups = self.n_head // self.n_kv_head
        unit = 2.0 ** round(-math.log2(scale))  # close to 1 / scale, and exact in every dtype
        rest = bias.to(torch.promote_types(k.dtype, torch.float32))
        rest = rest.unflatten(1, (self.n_kv_head, groups)).transpose(2, 3)  # [B or 1, Hkv, Tk, groups]
        rest = rest / (scale * unit)  # attention multiplies by scale, and queries by unit
        parts = [rest]
        if k.element_size() == 2:
            parts = []
            for _ in range(3):
                part = without_low_bits(rest, k.dtype)
                rest = rest - part
                parts.append(part.to(k.dtype))
        k_channels = torch.cat(parts, dim=-1)  # [B or 1, Hkv, Tk, parts groups]
        # Head g of a group picks its own channel of each part.
        own_channel = torch.eye(groups, dtype=k.dtype, device=k.device)
        q_channels = own_channel.repeat(self.n_kv_head, len(parts)) * unit  # [H, parts groups]
        unused = -k_channels.size(-1) % 8  # fused kernels want multiples of 8
        return F.pad(k_channels, (0, unused)), F.pad(q_channels, (0, unused))

    def _block(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, ctx: Context) -> Tensor:
        q_bias = bias[:, :, -q.size(2) :]  # b(i): queries are the newest of the keys' tokens
        by_pair = (bias[:, :, None] - q_bias[..., None]).to(exactly(q).dtype)  # [B or 1, H, Tq, Tk]
        return sdpa(q, k, v, scale=ctx.scale, sinks=ctx.sinks, visible=ctx.visible(), bias=by_pair)


class ExactBiasGradient(torch.autograd.Function):
    """The output of causal attention in 16 bit as it is, with an fp32 gradient for the bias of the keys.

    The gradient of a forget gate is the sum of the gradients of all biases after it, whose terms nearly cancel. If they
    were rounded to 16 bit, as the gradients of a key's channels are, little but noise would be left. So the backward
    pass computes the scores once more, in blocks of queries, and sums the gradient of each key's bias in fp32.

    Args of `apply`:
        out: the attention, [B, H, T, D], which is returned as it is.
        q, k, v: [B, H, T, D] and twice [B, Hkv, T, D], without the channels of the bias; they get their gradients
            through `out`.
        bias: the bias added to all scores of a key, fp32 or better [B or 1, H, T].
        ctx: the context of the call.
    """

    @staticmethod
    def forward(saved: Any, out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, ctx: Context) -> Tensor:
        saved.save_for_backward(q, k, v, bias)
        saved.scale = ctx.scale
        return out.view_as(out)

    @staticmethod
    def backward(saved: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads  # [B, H, Tq, D]
        q, k, v, bias = saved.saved_tensors

        # Keys and values for every head of queries, as the scores need them.
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

                # The same products as in the forward pass, in fp32 and a block of queries at a time.
                q_block = q[:, :, start:stop].float()  # [B, H, tq, D]
                grad_block = grad_out[:, :, start:stop].float()
                k_seen = k[:, :, :end].float()  # [B, H, tk, D]
                v_seen = v[:, :, :end].float()

                scores = q_block @ k_seen.transpose(2, 3) * saved.scale  # [B, H, tq, tk]
                scores = scores + bias[:, :, None, :end].float()
                is_future = torch.ones(stop - start, end, dtype=torch.bool, device=q.device).triu(past + start + 1)
                probabilities = scores.masked_fill(is_future, -math.inf).softmax(-1)
                # The gradient of each probability, and from it, by the derivative of the softmax, that of each score:
                # the probability times what its gradient exceeds the mean by.
                value_grads = grad_block @ v_seen.transpose(2, 3)
                mean = (probabilities * value_grads).sum(-1, keepdim=True)
                score_grads = probabilities * (value_grads - mean)
                bias_grad[:, :, :end] += score_grads.sum(2)
        # Summed over the batch where the bias is the same for all of it.
        bias_grad = bias_grad.sum_to_size(bias.shape).to(bias.dtype)
        return grad_out, None, None, None, bias_grad, None


class ALiBi(KeyBias):
    """ALiBi (arXiv 2108.12409): -m_h (i - j); the slopes m_h are not learned.

    Every head prefers near keys, and the first heads prefer them most.
    """

    in_place = True

    def slopes(self, device: torch.device) -> Tensor:
        """m_h, fp32 [H]: 2^(-8h/H) for h = 1..H.

        Where H is not a power of two, as the paper's authors chose: the slopes of the power of two below it, followed
        by every second one of the next.
        """
        below = 2 ** math.floor(math.log2(self.n_head))
        # Made on the device: a copy from the CPU would wait for it.
        h = torch.arange(1, below + 1, dtype=torch.float32, device=device)
        slopes = 2 ** (-8 * h / below)
        between = 2 ** (-4 * (2 * h - 1) / below)
        return torch.cat((slopes, between))[: self.n_head]

    def tables(self, pos: Tensor, length: int) -> Tensor:
        """m_h j, fp32 [length, H]; j counts from the first key, so that a shift of all positions changes no bit."""
        return (pos - pos[0])[:, None] * self.slopes(pos.device)

    def key_bias(self, state: dict[str, Tensor], ctx: Context) -> Tensor:
        return ctx.tables[None, -ctx.pos_k.size(0) :]


class NAPE(ALiBi):
    """NAPE (arXiv 2506.16640): ALiBi with slopes 1/h in the first half of the heads, no encoding in the others.

    Nothing is learned.
    """

    in_place = True

    def slopes(self, device: torch.device) -> Tensor:
        h = torch.arange(1, self.n_head + 1, dtype=torch.float32, device=device)
        return torch.where(h <= self.n_head // 2, 1 / h, 0.0)


class DistanceBias(PositionEncoding):
    """Base of biases that depend on the distance alone. All layers share them, and one row holds them for a text."""

    shared = True

    def at(self, distance: Tensor) -> Tensor:
        """Return the bias, fp32 [H, n], at the distances int64 [n]."""
        raise NotImplementedError

    def tables(self, pos: Tensor, length: int) -> Tensor:
        """The bias at the distances length - 1, .., 0, then zeros for the future: [H, length + BLOCK]."""
        return F.pad(self.at(pos.flip(0) - pos[0]), (0, BLOCK))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        q, k = self.rotate(q, k, ctx)
        row = None if overrides(self, DistanceBias, "bias") else partial(self.row, ctx)
        return attention(q, k, v, ctx, bias=self.bias, row=row)

    def row(self, ctx: Context) -> Tensor:
        """The bias at the distances 0 to ctx.length - 1, fp32 [H, ctx.length]."""
        if ctx.has_gaps:  # the table holds the distances between its tokens alone
            with torch.autocast(ctx.pos_k.device.type, enabled=False):
                return self.at(torch.arange(ctx.length, device=ctx.pos_k.device))
        return ctx.tables[:, : ctx.length].flip(1)

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        # With gaps neighbours are not one token apart, so every pair is looked up by its distance.
        if ctx.has_gaps:
            return self.at(ctx.distance.clamp(min=0).flatten()).unflatten(1, ctx.distance.shape)  # [H, Tq, Tk]
        # The last query's row, of the distances keys - 1, .., 0, is the end of the table, with zeros for the future.
        # The rows of the queries before it are shifts of it.
        queries = q.size(2)
        keys = ctx.pos_k.size(0)
        start = ctx.length - keys
        row = ctx.tables[:, None, start : start + keys + queries]  # [H, 1, keys + Tq]
        return shifted(row.expand(-1, queries, -1), keys)  # [H, Tq, Tk]


class T5(DistanceBias):
    """T5's relative bias (arXiv 1910.10683): a learned scalar for each head and bucket of distances, `table`
    [num_buckets, H].

    Half of the buckets hold one distance each. The others hold ranges that grow geometrically, and the last one also
    everything from `max_distance` on. The table starts as in T5, normal with std dim^-1/2. The bias is added to
    q.k / sqrt(D), and in T5 itself to q.k.
    """

    in_place = True

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
        # The place of a distance in the logarithmic half: 0 at its first distance, 1 at max_distance.
        place = torch.log(distance.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        logarithmic = (exact + place * exact).long().clamp(max=buckets - 1)
        return torch.where(distance < exact, distance, logarithmic)

    def at(self, distance: Tensor) -> Tensor:
        return F.embedding(self.bucket(distance), exactly(self.table)).T


class Kerple(DistanceBias):
    """KERPLE's logarithmic kernel (arXiv 2205.09921): -p ln(1 + a (i - j)), a bias that falls ever more slowly.

    `p` [H] and `a` [H] are learned. Both are at least 0.01 and start uniform, p in (0, 2) and a in (0, 1).
    """

    in_place = True

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.p = nn.Parameter(torch.zeros(shape.n_head))
        self.a = nn.Parameter(torch.zeros(shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.uniform_(self.p, 0.0, 2.0, generator)
        nn.init.uniform_(self.a, 0.0, 1.0, generator)

    def at(self, distance: Tensor) -> Tensor:
        p = bounded(exactly(self.p), 0.01)[:, None]  # [H, 1]
        a = bounded(exactly(self.a), 0.01)[:, None]
        return -p * torch.log1p(a * distance)


class Segments(NamedTuple):
    """FIRE's bias where its network is written as what it is, linear in segments: see `lab.kernels.fire.fire`."""

    kinks: Tensor  # where each of S segments begins, fp32 [S], ascending, the first of them 0
    slopes: Tensor  # of each head in each segment, fp32 [H, S]
    intercepts: Tensor  # of each head in each segment, fp32 [H, S]
    inverse_reach: Tensor  # what multiplies the logarithms of each query's distances, fp32 [T]
    c: Tensor  # fp32 [1]


class FIRE(PositionEncoding):
    """FIRE (arXiv 2310.04418): a small network f of the distance relative to the length of the text so far,
    f(ln(1 + c (i - j)) / ln(1 + c max(i, L))), with c, L and f learned and shared by all layers.

    i is the query's position in the text, so a shift of all positions changes the bias of queries beyond L. f has one
    hidden layer, `up_weight` [width, 1] and `down_weight` [H, width] with their biases.

    Args:
        width: units of the hidden layer of f (ReLU); f has one output for each head.
        init_c: initial c. The greater it is, the more of the range of f near tokens get.
        init_l: initial L, in tokens.
    """

    shared = True
    in_place = True
    kernels = "lab.kernels.fire"

    def __init__(
        self, shape: Shape, *, width: Count = 32, init_c: Positive = 0.1, init_l: Positive = 512.0, **options: Any
    ) -> None:
        super().__init__(shape, **options)
        self.init_c = init_c
        self.init_l = init_l
        self.c = nn.Parameter(torch.zeros(1))
        # L / init_l. An Adam step has about the size of the learning rate, which would hardly move L itself.
        self.l_multiplier = nn.Parameter(torch.zeros(1))
        self.up_weight = nn.Parameter(torch.zeros(width, 1))
        self.up_bias = nn.Parameter(torch.zeros(width))
        self.down_weight = nn.Parameter(torch.zeros(shape.n_head, width))
        self.down_bias = nn.Parameter(torch.zeros(shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start c and L as given, and the network as `nn.Linear` starts."""
        nn.init.constant_(self.c, self.init_c)
        nn.init.ones_(self.l_multiplier)
        reset_as_linear(self.up_weight, generator, self.up_bias)
        reset_as_linear(self.down_weight, generator, self.down_bias)

    def tables(self, pos: Tensor, length: int) -> Segments:
        """The bias as kernels need it, once for all layers."""
        units = exactly(torch.stack((self.up_weight[:, 0], self.up_bias)))  # [2, width]
        with torch.no_grad():
            weight, bias = units
            # A unit that rises with x is on beyond its kink, one that falls is on before it. x is never below 0, so a
            # unit that is always on, or never, has its kink at 0 or at infinity. A weight of 0 rises or falls by its
            # sign bit, as the division takes it.
            kinks = (-bias / weight).nan_to_num(torch.inf, posinf=torch.inf, neginf=0.0).clamp(min=0.0)  # [width]
            begins = F.pad(kinks.sort().values, (1, 0))  # [S]
            is_beyond = kinks[:, None] <= begins  # [width, S]
            is_on = (is_beyond != weight.signbit()[:, None]).to(units.dtype)
        slopes, intercepts = (units[:, None] * exactly(self.down_weight)) @ is_on  # [H, S] each
        c, reach = self._c_and_reach(pos)
        return Segments(begins, slopes, intercepts + exactly(self.down_bias)[:, None], reach.reciprocal(), c)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        if overrides(self, FIRE, "bias", "tables", "_c_and_reach", "_network") or not has_kernel(q, ctx):
            return super().attend(q, k, v, state, ctx)
        from lab.kernels import fire as kernels  # needs Triton, which only comes with PyTorch for GPUs

        segments = ctx.tables
        if ctx.places is not None:
            with torch.autocast(q.device.type, enabled=False):
                _, reach = self._c_and_reach(ctx.places.pos)
                segments = segments._replace(inverse_reach=reach.reciprocal())  # [B, T]
        q, k = self.rotate(q, k, ctx)
        first, last = seen_keys(q, ctx)
        return kernels.fire(q, k, v, first, last, scale=ctx.scale, sinks=ctx.sinks, **segments._asdict())

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # positions need fp32
            c, reach = self._c_and_reach(ctx.pos_q)
            distance = ctx.distance.clamp(min=0)  # [Tq, Tk]
            x = torch.log1p(c * distance) / reach[:, None]
            bias = self._network(x.flatten())  # [H, Tq Tk]
            return bias.unflatten(-1, x.shape)

    def _c_and_reach(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """c, fp32 [1], and what logarithms of distances are divided by for queries at `pos`, fp32 of the same shape."""
        c = exactly(self.c).abs()
        threshold = (exactly(self.l_multiplier) * self.init_l).abs()  # L
        # Both logarithms grow alike, so that f sees numbers of 0 to 1 however long the text is.
        return c, torch.log1p(c * torch.maximum(pos, threshold)) + 1e-6

    def _network(self, x: Tensor) -> Tensor:
        """Apply f to numbers x, fp32 [n]: [H, n]."""
        up_bias = exactly(self.up_bias)[:, None]  # [width, 1]
        down_bias = exactly(self.down_bias)[:, None]  # [H, 1]
        # The hidden layer is `width` times as large as the distances. On a CPU without a compiler it is computed in
        # parts that fit into a core's cache.
        size = x.numel()
        if not (x.is_cuda or torch.compiler.is_compiling()):
            size = 8192
        out = []
        for part in x.split(size):
            hidden = torch.addmm(up_bias, exactly(self.up_weight), part[None]).relu_()  # [width, part]
            out.append(torch.addmm(down_bias, exactly(self.down_weight), hidden))  # [H, part]
        return torch.cat(out, dim=1)
