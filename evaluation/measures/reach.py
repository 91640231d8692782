"""Reach: how far back does what a network predicts come from (after Chi et al., arXiv 2212.10356)?

For the last token of each text: the share that comes from tokens at a distance of d or more of the attention weights,
and of the gradient of the loss by the inputs of each layer, of which those of the first are the embeddings. A network
may be safe at a length because it is short-sighted; its reach tells.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import Config
from data.base import Data
from evaluation.results import Measured
from evaluation.scoring import Job, Plan, Scorer
from model.attention import Context
from model.gpt import GPT
from model.position.cope import CoPE

BATCH_TOKENS = 4096  # read at once, about: activations are kept for the gradient
Attend = Callable[[Tensor, Tensor, Tensor, dict[str, Tensor], Context], Tensor]


def reach(data: Data, cfg: Config) -> Plan | None:
    """Return the measure at the longest length; None for tasks.

    Distances are train_len / 8 and its doublings, as far as the texts have them.
    """
    if data.task:
        return None
    length = max(cfg.lengths)
    (texts,) = data.eval_sets([length], target_tokens=1, sequences=cfg.eval.sequences)
    distances = [max(1, cfg.train_len // 8)]
    while 2 * distances[-1] < length:
        distances.append(2 * distances[-1])

    def run(score: Scorer) -> list[Measured]:
        sums = score(texts)
        n = len(sums.nats)
        size = max(1, BATCH_TOKENS // length)
        batches = []
        for start in range(0, n, size):
            x, y = texts.batch(start, min(n, start + size))
            with score.autocast():
                batches.append(shares(score.net, x, y[:, -1], distances))
        measured = []
        for name in batches[0]:
            of_texts = torch.cat([batch[name] for batch in batches])  # [texts, distances]
            for i, distance in enumerate(distances):
                values = (100 * of_texts[:, i]).tolist()
                span = (distance, length - 1)
                measured.append(sums.measured(length, texts=texts, difficulty=name, span=span, reach=values))
        return measured

    settings = {
        "length": length,
        "distances": distances,
        "sequences": cfg.eval.sequences,
        "texts": texts.texts_hash,
    }
    return Plan("reach", settings, [Job(length, texts.n * length, run)])


def shares(net: GPT, x: Tensor, targets: Tensor, distances: Sequence[int]) -> dict[str, Tensor]:
    """Return the shares that come from at least each distance, fp64 [B, distances] on the CPU, by what is shared.

    Args:
        x: token ids, int64 [B, T].
        targets: the tokens after the last ones, int64 [B].
    """
    was_training = net.training
    device = net.embedding.weight.device
    x, targets = x.to(device), targets.to(device)
    net.eval()
    attention = [_beyond(weights, distances).mean(1) for weights in _attention(net, x)]  # heads count alike
    gradient = [_beyond(norms, distances) for norms in _gradient(net, x, targets)]
    net.train(was_training)
    # A gradient by the embeddings comes through all layers. Attention has no such sum: here it is the mean.
    result = {"attention": torch.stack(attention).mean(0), "gradient": gradient[0]}
    for layer, share in enumerate(attention, start=1):
        result[f"attention in layer {layer}"] = share
    for layer, share in enumerate(gradient[1:], start=2):
        result[f"gradient from layer {layer} on"] = share
    return {name: share.cpu() for name, share in result.items()}


def _beyond(amounts: Tensor, distances: Sequence[int]) -> Tensor:
    """Return the share of `amounts` [..., T] that lies at least each distance before the last token, fp64."""
    amounts = amounts.double()
    far = torch.stack([amounts[..., :-distance].sum(-1) for distance in distances], dim=-1)
    return far / amounts.sum(-1, keepdim=True)


@torch.no_grad()
def _attention(net: GPT, x: Tensor) -> list[Tensor]:
    """Return the weights with which the last token reads all tokens in each layer, [B, H, T]."""
    weights: list[Tensor] = []
    with _recording(net, weights):
        net.hidden_states(x)
    return weights


@contextmanager
def _recording(net: GPT, weights: list[Tensor]) -> Iterator[None]:
    """Let every encoding of `net` append the weights of its last query to `weights` when it attends.

    Raises ValueError: an encoding makes gates of the values.
    """
    for pe in net.distinct_encodings:
        if isinstance(pe, CoPE) and pe.gates == "values":
            raise ValueError(
                "measures: reach takes gradients by values, of which pe.gates=values makes gates; leave it out"
            )
    for pe in net.distinct_encodings:
        pe.attend = _recorder(pe.attend, weights)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for pe in net.distinct_encodings:
            del pe.attend  # that of the class is back


def _recorder(attend: Attend, weights: list[Tensor]) -> Attend:
    # No kernel returns its weights. But attention is linear in the values, and an encoding may add to a value or turn
    # it, no more. So the gradient of one channel of the output by the value of a token is as long as its weight.
    def recorder(q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        with torch.enable_grad():
            v = v.detach().requires_grad_()
            out = attend(q, k, v, state, ctx)
            # Heads that share a value are told apart by a gradient each.
            of_group = out[:, :, -1, 0].unflatten(1, (v.size(1), -1)).sum((0, 1))  # [H / Hkv]
            norms = [torch.autograd.grad(total, v, retain_graph=True)[0].norm(dim=-1) for total in of_group]
        weights.append(torch.stack(norms, dim=2).flatten(1, 2))
        return out.detach()

    return recorder


def _gradient(net: GPT, x: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the norms of the gradient of the last token's loss by the inputs of each layer, [B, T]."""
    inputs: list[Tensor] = []

    def keep(block: torch.nn.Module, arguments: tuple) -> tuple:
        hidden, *others = arguments
        if not inputs:
            hidden = hidden.detach().requires_grad_()
        inputs.append(hidden)
        return hidden, *others

    hooks = [block.register_forward_pre_hook(keep) for block in net.blocks]
    try:
        with torch.enable_grad():
            hidden = net.hidden_states(x)[:, -1:]  # [B, 1, C]
            logits = net.head(hidden)[:, 0, : net.vocab_size].float()
            loss = F.cross_entropy(logits, targets, reduction="sum")
            return [grad.norm(dim=-1) for grad in torch.autograd.grad(loss, inputs)]
    finally:
        for hook in hooks:
            hook.remove()
