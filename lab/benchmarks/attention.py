"""Attention with every encoding beside PyTorch's causal attention without one: time, and memory over the length."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conf import plugins
from conf.options import by_name, encoding_names
from lab.benchmarks.measure import Passes, Row, compared
from model import position
from model.position import PositionEncoding, Shape
from model.position.layer import init_parameters, make_context
from model.position.windowed import TrainingFree


def layer(options: Any, length: int, pe: PositionEncoding | None = None) -> Passes:
    """Return one layer's attention over random q, k, v [batch, length, n_head, head_dim].

    It includes work that a network does once for all layers, such as computing angles: in a network of several layers
    an encoding costs less than here.

    Args:
        options: sizes, dtype and device.
        length: tokens.
        pe: the encoding; None: PyTorch's causal attention without one.

    Returns:
        "forward" and "both" passes.
    """
    # Drawn on the device: long texts of a large batch would take a CPU seconds a layer.
    generator = torch.Generator(options.device).manual_seed(0)
    size = (4, options.batch, length, options.n_head, options.head_dim)
    q, k, v, grad = torch.randn(size, generator=generator, device=options.device).to(getattr(torch, options.dtype))
    x = q.flatten(2).clone()  # the input of the layer, which some encodings read
    # A gate of CoPE is the sigmoid of q.k, which these signs make negative for all pairs. So no position reaches the
    # end of its table, which is CoPE's worst case.
    q, k = q.abs(), -1.5 * k.abs()
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, x)]
    if pe is not None:
        inputs += pe.parameters()
    pos = torch.arange(length, device=options.device)

    def attend() -> Tensor:
        if pe is None:
            by_head = [tensor.transpose(1, 2) for tensor in (q, k, v)]  # [B, H, T, D] each
            return F.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2)  # type: ignore[misc]
        with torch.autocast(options.device, torch.bfloat16, enabled=options.dtype != "float32"):
            return make_context(pe, pos, length, length).attend(pe, q, k, v, pe.state(x), layer=0)

    def both() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(attend(), inputs, grad, allow_unused=True)

    return {"forward": torch.no_grad()(attend), "both": both}


def layer_of(options: Any, encoding: dict[str, Any], length: int) -> Passes:
    """Return `layer` with an encoding of its own, trained at this length.

    A training-free extension is active: it was trained at a quarter of the length.
    """
    dim = options.n_head * options.head_dim
    shape = Shape(dim, options.n_head, options.n_head, options.head_dim, length, n_layer=1)
    (pe,) = position.build_encodings(encoding, shape)
    if isinstance(pe, TrainingFree):
        (pe,) = position.build_encodings(encoding, shape._replace(train_len=max(2, length // 4)))
        pe.active_scale = pe.scales[-1]
    init_parameters(pe, torch.Generator().manual_seed(0))
    if options.kernels is True:
        plugins.kernels().install([pe])
    return layer(options, length, pe.to(options.device))


def attention(options: Any) -> Iterator[Row]:
    """Yield rows of a table: attention with each encoding beside PyTorch's."""
    encodings = by_name(options.encodings or encoding_names(), "encodings")
    # A pattern costs what its parts cost, which are measured on their own.
    makers = {name: partial(layer_of, options, pe) for name, pe in encodings.items() if "pattern" not in pe}
    return compared(options, {"SDPA": partial(layer, options)} | makers)
