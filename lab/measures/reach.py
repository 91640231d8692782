"""Reach: how far back does what a network predicts come from (after Chi et al., arXiv 2212.10356)?

For the last token of each text: the share that comes from tokens at a distance of d or more of the attention weights,
and of the gradient of the loss by the inputs of each layer, of which those of the first are the embeddings. A network
may be safe at a length because it is short-sighted; its reach tells.

For: telling why an encoding is safe. Shown: in docs/results.md, which encodings are short-sighted. Leaves: when the
loss by the distance of far copies says as much.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import Config
from data.base import Data, EvalSet
from lab.pictures.attention_weights import attended
from model.gpt import GPT
from model.position.network import Encodings
from ropewalk.evaluation.measures.base import Measure, Part, Plan
from ropewalk.evaluation.results import PartResult
from ropewalk.evaluation.scoring import Scorer

BATCH_TOKENS = 4096  # read at once, about: activations are kept for the gradient


class Reach(Measure):
    """The measure at the longest length, for text whose documents are read together.

    Distances are train_len / 8 and its doublings within the texts.
    """

    def plan(self, data: Data, cfg: Config) -> Plan | None:
        if data.task or data.document_end is not None:
            return None
        length = max(cfg.lengths)
        (texts,) = data.eval_sets([length], target_tokens=1, sequences=cfg.eval.sequences)
        distances = [max(1, cfg.train_len // 8)]
        while 2 * distances[-1] < length:
            distances.append(2 * distances[-1])
        settings = {
            "length": length,
            "distances": distances,
            "sequences": cfg.eval.sequences,
            "texts": texts.texts_hash,
        }
        return Plan("reach", settings, [Part(length, partial(_run, texts, distances))])


def _run(texts: EvalSet, distances: Sequence[int], scorer: Scorer) -> list[PartResult]:
    sums = scorer(texts)
    n = len(sums.nats)
    size = max(1, BATCH_TOKENS // texts.length)
    batches = []
    for start in range(0, n, size):
        x, y = texts.batch(start, min(n, start + size))
        with scorer.autocast():
            batches.append(shares(scorer.net, x, y[:, -1], distances, scorer.encodings))
    measured = []
    for name in batches[0]:
        percent = 100 * torch.cat([batch[name] for batch in batches])  # [texts, distances]
        for distance, share in zip(distances, percent.T.tolist(), strict=True):
            span = (distance, texts.length - 1)
            measured.append(sums.measured(texts.length, texts=texts, difficulty=name, span=span, reach=share))
    return measured


def shares(
    net: GPT, x: Tensor, targets: Tensor, distances: Sequence[int], encodings: Encodings | None = None
) -> dict[str, Tensor]:
    """Return the shares that come from at least each distance, fp64 [B, distances] on the CPU, by what is shared.

    Args:
        net: in evaluation mode.
        x: token ids, int64 [B, T].
        targets: the tokens after the last ones, int64 [B].
        encodings: that read them instead of the network's own.
    """
    device = net.embedding.weight.device
    x, targets = x.to(device), targets.to(device)
    layers = attended(net, x, [x.size(1) - 1], encodings)
    attention = [_beyond(weights[:, :, 0], distances).mean(1) for weights in layers]  # heads count alike
    gradient = [_beyond(norms, distances) for norms in _gradient(net, x, targets, encodings)]
    # A gradient by the embeddings comes through all layers. Attention has no such sum: here it is the mean.
    result = {"attention": torch.stack(attention).mean(0), "gradient": gradient[0]}
    for number, share in enumerate(attention, start=1):
        result[f"attention in layer {number}"] = share
    for number, share in enumerate(gradient[1:], start=2):
        result[f"gradient from layer {number} on"] = share
    return {name: share.cpu() for name, share in result.items()}


def _beyond(amounts: Tensor, distances: Sequence[int]) -> Tensor:
    """Return the share of `amounts` [..., T] that lies at least each distance before the last token, fp64."""
    amounts = amounts.double()
    far = torch.stack([amounts[..., :-distance].sum(-1) for distance in distances], dim=-1)
    return far / amounts.sum(-1, keepdim=True)


def _gradient(net: GPT, x: Tensor, targets: Tensor, encodings: Encodings | None) -> list[Tensor]:
    """Return the norms of the gradient of the last token's loss by the inputs of each layer, [B, T]."""
    inputs: list[Tensor] = []

    def keep(block: torch.nn.Module, arguments: tuple) -> tuple:
        hidden, *others = arguments
        if not inputs:
            hidden = hidden.detach().requires_grad_()
        inputs.append(hidden)
        return hidden, *others

    with ExitStack() as hooks, torch.enable_grad():
        for block in net.blocks:
            hooks.enter_context(block.register_forward_pre_hook(keep))
        hidden = net.hidden_states(x, encodings=encodings)[:, -1:]  # [B, 1, C]
        logits = net.head(hidden)[:, 0, : net.vocab_size].float()
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return [grad.norm(dim=-1) for grad in torch.autograd.grad(loss, inputs)]
