"""Operations that encodings of the zoo share."""

import torch.nn.functional as F
from torch import Tensor


def unit_vectors(x: Tensor) -> Tensor:
    """Scale the vectors in the last dimension to length 1; same shape. A vector of zeros stays one."""
    squared = x.square().sum(-1, keepdim=True)
    return x * (squared + 1e-6).rsqrt()


def short_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each channel of `x` [B, T, C] with its own `kernel` [C, width], over a token and those before it."""
    # Zeros stand in for the tokens before the first, so no token sees a later one.
    past = kernel.size(1) - 1
    padded = F.pad(x.mT, (past, 0))  # [B, C, past + T]
    return F.conv1d(padded, kernel[:, None], groups=kernel.size(0)).mT
