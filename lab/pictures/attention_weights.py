"""The weights of attention, which no kernel returns."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model.gpt import GPT
from model.position import Context, PositionEncoding
from model.position.cope import CoPE
from model.position.network import Encodings, view


def weights_of(attend: Callable[[Tensor], Tensor], v: Tensor, queries: Sequence[int]) -> Tensor:
    """Return the absolute weights with which some queries read all keys, [B, H, queries, T].

    Args:
        attend: the output [B, H, Tq, D] as a function of the values.
        v: the values, [B, Hkv, T, D].
        queries: their indices among the Tq queries.
    """
    # Attention is linear in the values, and an encoding may add to a value or turn it, no more. So the gradient of one
    # channel of the output by the value of a token is as long as its weight.
    with torch.enable_grad():
        v = v.detach().requires_grad_()
        channel = attend(v)[..., 0].unflatten(1, (v.size(1), -1))  # [B, Hkv, H / Hkv, Tq]
        weights = []
        for query in queries:
            # Heads that share a value are told apart by a gradient each.
            totals = channel[..., query].sum((0, 1))  # [H / Hkv]
            norms = [torch.autograd.grad(total, v, retain_graph=True)[0].norm(dim=-1) for total in totals]
            weights.append(torch.stack(norms, dim=2).flatten(1, 2))  # [B, H, T]
    return torch.stack(weights, dim=2)


@torch.no_grad()
def attended(net: GPT, ids: Tensor, queries: Sequence[int], encodings: Encodings | None = None) -> list[Tensor]:
    """Return the `weights_of` each layer of a network in texts `ids` int64 [B, T], for some of the T queries.

    `encodings` read them instead of the network's own.

    Raises ValueError: an encoding makes gates of the values, so that attention is not linear in them.
    """
    encodings = encodings or net.encodings
    if any(isinstance(pe, CoPE) and pe.gates == "values" for pe in encodings):
        raise ValueError("pe.gates=values: weights cannot be read where gates are made of values; leave them out")
    layers: list[Tensor] = []

    def recorder(pe: PositionEncoding) -> Callable[..., Tensor]:
        attend = pe.attend

        def record(q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
            def of_values(values: Tensor) -> Tensor:
                return attend(q, k, values, state, ctx)

            layers.append(weights_of(of_values, v, queries))
            return of_values(v)

        return record

    recording = {pe: view(pe, attend=recorder(pe)) for pe in dict.fromkeys(encodings)}
    net.hidden_states(ids, encodings=[recording[pe] for pe in encodings])
    return layers
