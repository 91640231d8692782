"""Additive biases: a score changes with the distance between query and key, by a function of its own for each head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.position.base import PositionEncoding, Shape


def distance(pos_q: Tensor, pos_k: Tensor) -> Tensor:
    """Tokens from key back to query, int64 [Tq, Tk]; 0 for keys after the query, which are masked anyway."""
    return (pos_q[:, None] - pos_k[None, :]).clamp(min=0)


class ALiBi(PositionEncoding):
    """ALiBi (arXiv 2108.12409): -m_h (i - j); the slopes m_h are not learned, see `alibi_slopes`."""

    linear_memory = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.n_head = shape.n_head

    def bias(self, pos_q: Tensor, pos_k: Tensor) -> Tensor:
        return -alibi_slopes(self.n_head, pos_q.device)[:, None, None] * distance(pos_q, pos_k)  # [H, Tq, Tk]


def alibi_slopes(n_head: int, device: torch.device | None = None) -> Tensor:
    """2^(-8h/H) for h = 1..H, fp32 [H].

    Where H is not a power of two, those of the power of two below it, followed by every second one of the next power
    of two, as the paper's authors chose.
    """
    below = 2 ** math.floor(math.log2(n_head))
    h = torch.arange(1, below + 1, dtype=torch.float32, device=device)  # made on the device: a copy would wait for it
    return torch.cat((2 ** (-8 * h / below), 2 ** (-4 * (2 * h - 1) / below)))[:n_head]


class T5(PositionEncoding):
    """T5's relative bias (arXiv 1910.10683): a learned scalar for each head and bucket of distances.

    Half of the buckets hold one distance each, the others ranges that grow geometrically; the last one also
    everything from `max_distance` on. The table is shared by all layers and starts as T5's, normal with std
    dim^-1/2. Unlike T5 itself, whose scores are not scaled, the bias is added to q.k / sqrt(D).

    Args:
        num_buckets: even, at least 2.
        max_distance: in tokens, more than num_buckets / 2.
    """

    linear_memory = False

    def __init__(self, shape: Shape, *, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__(shape)
        if num_buckets < 2 or num_buckets % 2:
            raise ValueError(f"pe.num_buckets={num_buckets} must be even and at least 2")
        if max_distance <= num_buckets // 2:
            raise ValueError(
                f"pe.max_distance={max_distance} must be greater than {num_buckets // 2}: half of "
                f"pe.num_buckets={num_buckets} hold one distance each"
            )
        self.max_distance, self.std = max_distance, shape.dim**-0.5
        self.table = nn.Parameter(torch.zeros(num_buckets, shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        self.table.copy_(torch.empty(self.table.shape).normal_(0.0, self.std, generator=generator))

    def bucket(self, distance: Tensor) -> Tensor:
        """Index of the bucket of each distance, int64."""
        buckets = self.table.size(0)
        exact = buckets // 2
        share = torch.log(distance.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        return torch.where(distance < exact, distance, (exact + share * exact).long().clamp(max=buckets - 1))

    def bias(self, pos_q: Tensor, pos_k: Tensor) -> Tensor:
        bucket = self.bucket(torch.arange(self.max_distance + 1, device=pos_q.device))  # of each distance that matters
        index = distance(pos_q, pos_k).clamp(max=self.max_distance)
        return F.embedding(index, self.table.float()[bucket]).permute(2, 0, 1)  # [Tq, Tk, H] -> [H, Tq, Tk]


class Kerple(PositionEncoding):
    """KERPLE's logarithmic kernel (arXiv 2205.09921): -p ln(1 + a (i - j)), with p and a learned for each head.

    Both are at least 0.01 and start uniform, p in (0, 2) and a in (0, 1).
    """

    linear_memory = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.p = nn.Parameter(torch.zeros(shape.n_head))
        self.a = nn.Parameter(torch.zeros(shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        _uniform(self.p, 0.0, 2.0, generator)
        _uniform(self.a, 0.0, 1.0, generator)

    def bias(self, pos_q: Tensor, pos_k: Tensor) -> Tensor:
        p, a = (_at_least(x.float(), 0.01)[:, None, None] for x in (self.p, self.a))  # [H, 1, 1]
        return -p * torch.log1p(a * distance(pos_q, pos_k))  # [H, Tq, Tk]


class FIRE(PositionEncoding):
    """FIRE (arXiv 2310.04418): a small network f of the distance relative to the length of the text so far,
    f(ln(1 + c (i - j)) / ln(1 + c max(i, L))), with c, L and f learned and shared by all layers.

    i is the query's position in the text, so this is not invariant to a shift of all positions, except among
    queries before L. The network holds `width` numbers for each pair of tokens, once in each forward.

    Args:
        width: units of its hidden layer (ReLU); there is one output for each head.
        init_c: initial c. The greater, the more of the range is given to near tokens.
        init_l: initial L, in tokens.
    """

    linear_memory = False

    relative = False

    def __init__(self, shape: Shape, *, width: int = 32, init_c: float = 0.1, init_l: float = 512.0) -> None:
        super().__init__(shape)
        for name, value in (("width", width), ("init_c", init_c), ("init_l", init_l)):
            if not 0 < value < math.inf:
                raise ValueError(f"pe.{name}={value:g} must be positive")
        self.init_c, self.init_l = init_c, init_l
        self.c = nn.Parameter(torch.zeros(1))
        self.l_multiplier = nn.Parameter(torch.zeros(1))  # of init_l: a step of the optimiser moves L by a fraction
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
            _uniform(weight, -bound, bound, generator)
            _uniform(bias, -bound, bound, generator)

    def bias(self, pos_q: Tensor, pos_k: Tensor) -> Tensor:
        c = self.c.float().abs()
        reach = torch.maximum(pos_q, (self.l_multiplier.float() * self.init_l).abs())  # [Tq]
        x = torch.log1p(c * distance(pos_q, pos_k)) / (torch.log1p(c * reach) + 1e-6)[:, None]  # [Tq, Tk]
        x = F.relu(F.linear(x[..., None], self.up_weight.float(), self.up_bias.float()))  # [Tq, Tk, width]
        return F.linear(x, self.down_weight.float(), self.down_bias.float()).permute(2, 0, 1)  # [H, Tq, Tk]


def _uniform(p: Tensor, low: float, high: float, generator: torch.Generator) -> None:
    p.copy_(torch.empty(p.shape).uniform_(low, high, generator=generator))


def _at_least(x: Tensor, low: float) -> Tensor:
    """max(x, low) with the gradient of x, so that a parameter pushed below the limit can come back."""
    return x + (x.clamp(min=low) - x).detach()
