"""Reach: planted networks whose reach is known, and gradients computed another way."""

from types import SimpleNamespace

import numpy as np
import torch
from conftest import build_gpt
from planted import Texts, results_of

from lab.measures import reach
from model.position import PositionEncoding, Shape
from model.position.network import view
from ropewalk.evaluation.scoring import Scorer

LENGTH, TRAIN_LEN, VOCAB = 128, 64, 50
DISTANCES = [8, 16, 32, 64]
DATA = Texts(np.random.default_rng(0).integers(VOCAB, size=(3, LENGTH + 1)))
CFG = SimpleNamespace(lengths=[LENGTH], train_len=TRAIN_LEN, eval=SimpleNamespace(sequences=3))


class CopiesFromFar(PositionEncoding):
    """Every token reads the one 40 before it and nothing else; the first ones read the first."""

    def attend(self, q, k, v, state, ctx):
        v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
        source = (ctx.pos_q - 40).clamp(min=0)
        return v[:, :, source]


def measured(net):
    """The shares in percent by name, [distances, texts]."""
    shares = {}
    for result in results_of(reach.Reach().plan(DATA, CFG), net):
        shares.setdefault(result.difficulty, {})[result.span[0]] = list(result.reach)
    return {name: torch.tensor([values[d] for d in DISTANCES]) for name, values in shares.items()}


ATTENTION = ("attention", "attention in layer 1", "attention in layer 2")


def test_a_window_of_32_reaches_no_further_than_its_layers():
    """A layer reads 31 tokens back, and two of them 62."""
    shares = measured(build_gpt("rope", vocab_size=VOCAB, train_len=TRAIN_LEN, pe={"window": 32}))

    for name in (*ATTENTION, "gradient from layer 2 on"):
        assert (shares[name][:2] > 0).all()
        assert (shares[name][2:] == 0).all()
    assert (shares["gradient"][:3] > 0).all()
    assert (shares["gradient"][3:] == 0).all()


def test_a_network_that_copies_from_far_reaches_so_far():
    """Two layers read 80 tokens back, and the token itself stays in the residual stream."""
    net = build_gpt("nope", vocab_size=VOCAB, train_len=TRAIN_LEN)
    net.encodings = [CopiesFromFar(Shape(64, 4, 2, 16, TRAIN_LEN, 2))] * 2
    shares = measured(net)

    for name in ATTENTION:
        assert (shares[name][:3] == 100).all()
        assert (shares[name][3:] == 0).all()

    gradient = shares["gradient"]

    assert torch.equal(gradient[0], gradient[2])
    assert ((gradient > 0) & (gradient < 100)).all()
    assert (shares["gradient from layer 2 on"][2] > 0).all()
    assert (shares["gradient from layer 2 on"][3] == 0).all()


def test_a_variant_is_measured_by_its_own_encodings():
    net = build_gpt("rope", vocab_size=VOCAB, train_len=TRAIN_LEN)
    with_window = [view(pe, window=8) for pe in net.encodings]
    (job,) = reach.Reach().plan(DATA, CFG).jobs

    def far(*encodings):
        results = job.run(Scorer(net, *encodings))
        far = [m for m in results if m.difficulty == "attention in layer 1" and m.span[0] >= 8]
        return {share for m in far for share in m.reach}

    assert far(with_window) == {0.0}
    assert max(far()) > 0


def test_the_gradient_is_that_of_the_embeddings():
    net = build_gpt("fox", vocab_size=VOCAB, tie_embeddings=False)
    # Distinct tokens, so that each has a row of the embedding of its own.
    x = torch.stack([torch.randperm(VOCAB)[:20], torch.randperm(VOCAB)[:20]])
    targets = torch.tensor([7, 7])
    distances = (1, 5, 19)
    shares = reach.shares(net, x, targets, distances)["gradient"]
    for text, target, share in zip(x, targets, shares, strict=True):
        logits = net(text[None])[0, -1]
        loss = torch.nn.functional.cross_entropy(logits, target)
        (rows,) = torch.autograd.grad(loss, net.embedding.weight)
        norms = rows[text].norm(dim=-1).double()
        beyond = torch.stack([norms[: 20 - distance].sum() for distance in distances])

        torch.testing.assert_close(share, beyond / norms.sum(), rtol=1e-5, atol=1e-7)
