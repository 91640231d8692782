"""Scale-invariant attention: scores grow, and sink, with the logarithm of the distance.

For: one law for both causes of a failure on longer text. Has shown: nothing yet. Leaves: if five seeds on Markov texts
show no gain over p-RoPE with `ssmax`.
"""

from typing import Any

from torch import Tensor

from model.attention import for_heads_of, in_blocks, products, softmax
from model.position.base import Context, PositionEncoding, Positive, Shape
from model.position.rotary import PRope


class ScaleInvariant(PositionEncoding):
    """Scale-invariant attention (arXiv 2505.17083): the score z of a key at distance d becomes a z + 1 - a^2, with
    a^2 = 1 + 2 ln(1 + d / tau). If scores are normal, 10 to 100 tokens back get as much weight as 100 to 1,000.

    Args:
        tau: tokens; keys much nearer are attended to as usual.
    """

    def __init__(self, shape: Shape, *, tau: Positive = 10.0, **options: Any) -> None:
        super().__init__(shape, **options)
        self.tau = tau

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        def block(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
            scores = products(q, for_heads_of(q, k), ctx.scale)  # [B, H, Tq, Tk]
            distance = ctx.distance.clamp(min=0).to(scores.dtype)
            shift = -2 * (distance / self.tau).log1p()  # 1 - a^2, [Tq, Tk]
            scores = scores * (1 - shift).sqrt() + shift + ctx.mask()
            return softmax(scores, ctx.sinks).to(v.dtype) @ for_heads_of(q, v)

        q, k = self.rotate(q, k, ctx)
        return in_blocks(block, (q,), (k, v), ctx)


class RotaryScaleInvariant(PRope, ScaleInvariant):
    """Scale-invariant attention and p-RoPE, which the paper combines."""

    family = "scale-invariant"
