"""Reach: planted networks whose reach is known, and gradients computed another way."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from conftest import build_gpt, tokens
from planted import Texts, results_of

from lab.measures import reach
from model.position.network import view
from ropewalk.evaluation.scoring import Scorer

LENGTH, TRAIN_LEN, VOCAB = 128, 64, 50
DISTANCES = [8, 16, 32, 64]
DATA = Texts(tokens(LENGTH + 1, 3, VOCAB))
CFG = SimpleNamespace(
    lengths=[LENGTH],
    train_len=TRAIN_LEN,
    eval=SimpleNamespace(sequences=3),
)


def network(name, **options):
    return build_gpt(name, vocab_size=VOCAB, train_len=TRAIN_LEN, **options)


def measured(net):
    """The shares in percent by name, [distances, texts]."""
    shares = defaultdict(dict)
    for result in results_of(reach.Reach().plan(DATA, CFG), net):
        distance, *_ = result.span
        shares[result.difficulty][distance] = list(result.reach)
    for name, by_distance in shares.items():
        shares[name] = torch.tensor([by_distance[distance] for distance in DISTANCES])
    return shares


ATTENTION = ("attention", "attention in layer 1", "attention in layer 2")


def test_a_window_of_32_reaches_no_further_than_its_layers():
    """A layer reads 31 tokens back, and two of them 62."""
    shares = measured(network("rope", pe={"window": 32}))

    met = dict.fromkeys((*ATTENTION, "gradient from layer 2 on"), 2) | {"gradient": 3}  # of the distances
    for name, n_met in met.items():
        near, far = shares[name].tensor_split([n_met])

        assert near.all()
        assert not far.any()


def test_documents_that_are_read_apart_have_none(monkeypatch):
    """What is measured reads across their borders, as the network does not."""
    monkeypatch.setattr(DATA, "document_end", 3, raising=False)
    assert reach.Reach().plan(DATA, CFG) is None


def test_a_variant_is_measured_by_its_own_encodings():
    net = network("rope")
    with_window = [view(pe, window=8) for pe in net.encodings]
    (part,) = reach.Reach().plan(DATA, CFG).parts

    def far(*encodings):
        """The shares of what lies at least 8 tokens back."""
        results = part.run(Scorer(net, *encodings))
        return [list(result.reach) for result in results if result.difficulty == "attention in layer 1"]

    assert not np.any(far(with_window))
    assert np.any(far())


def test_the_gradient_is_that_of_the_embeddings():
    net = build_gpt("fox", vocab_size=VOCAB, tie_embeddings=False).double()  # no rounding decides
    # Distinct tokens, so that each has a row of the embedding of its own.
    generator = torch.Generator().manual_seed(0)
    x = torch.stack([torch.randperm(VOCAB, generator=generator)[:20] for _ in range(2)])
    targets = torch.tensor([7, 7])
    distances = (1, 5, 19)

    shares = reach.shares(net, x, targets, distances)["gradient"]

    for text, target, share in zip(x, targets, shares, strict=True):
        loss = F.cross_entropy(net(text[None])[0, -1], target)
        (rows,) = torch.autograd.grad(loss, net.embedding.weight)
        norms = rows[text].norm(dim=-1).double()
        shares_so_far = norms.cumsum(0) / norms.sum()
        beyond = shares_so_far[[19 - distance for distance in distances]]

        torch.testing.assert_close(share, beyond, rtol=1e-5, atol=1e-7)
