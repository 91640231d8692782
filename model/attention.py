"""Scaled dot-product attention, the one place where a kernel is chosen, and the key-value cache."""

import torch.nn.functional as F
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Softmax attention of `q` over `k`, `v`; without a mask in memory linear in the sequence length.

    Args:
        q: queries [B, H, Tq, D].
        k, v: keys and values [B, Hkv, Tk, D]; H is a multiple of Hkv (grouped-query attention).
        scale: multiplies q.k before the softmax.
        mask: None, a boolean [Tq, Tk] (True is visible) or a float [H, Tq, Tk] or [B, H, Tq, Tk] added
            to the scores.
        causal: query t sees keys 0..t. Needs Tq == Tk and no mask: PyTorch aligns its causal mask
            to the top left, which is wrong for a chunk at the end of a longer text.

    Returns:
        [B, H, Tq, D]
    """
    assert not (causal and mask is not None), "fold causality into the mask"
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
        if mask.ndim == 3:
            mask = mask[None]  # with three dimensions the CPU's fused kernel would be passed over
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )


class KVCache:
    """Keys and values of the text read so far, one growing buffer pair for each layer.

    A buffer doubles when it is full, so appending T tokens one by one copies O(T) in all.
    """

    def __init__(self, n_layer: int) -> None:
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * n_layer
        self._lengths = [0] * n_layer

    @property
    def length(self) -> int:
        """Tokens held by every layer."""
        return self._lengths[-1]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add `k`, `v` [B, Hkv, T, D] to one layer; return all of its keys and values [B, Hkv, length, D]."""
        old, new = self._lengths[layer], self._lengths[layer] + k.size(2)
        buffers = self._buffers[layer]
        if buffers is None or buffers[0].size(2) < new:
            room = max(new, 2 * old)
            grown = tuple(x.new_empty(x.size(0), x.size(1), room, x.size(3)) for x in (k, v))
            if buffers is not None:
                for to, held in zip(grown, buffers, strict=True):
                    to[:, :, :old] = held[:, :, :old]
            buffers = self._buffers[layer] = (grown[0], grown[1])
        buffers[0][:, :, old:new], buffers[1][:, :, old:new] = k, v
        self._lengths[layer] = new
        return buffers[0][:, :, :new], buffers[1][:, :, :new]
