"""Reach: planted networks whose reach is known, weights and gradients computed another way."""

from types import SimpleNamespace

import pytest
import torch
from conftest import build_gpt, build_pe

from data.base import IGNORE_INDEX, EvalSet
from evaluation.measures import reach
from evaluation.results import Evaluation, Variant
from evaluation.scoring import Scorer
from model.position import PositionEncoding, Shape
from model.position.layer import make_context

LENGTH, TRAIN_LEN, VOCAB = 128, 64, 50
DISTANCES = [8, 16, 32, 64]


class Texts:
    """Three texts of random tokens."""

    task = token_bytes = None

    def eval_sets(self, lengths, *, target_tokens, sequences):
        tokens = torch.randint(VOCAB, (3, *lengths), generator=torch.Generator().manual_seed(0))
        return [EvalSet("text", *lengths, 3, lambda a, b: (tokens[a:b], tokens[a:b].roll(-1, 1)), "t")]


class CopiesFromFar(PositionEncoding):
    """Every token reads the one 40 before it and nothing else; the first ones read the first."""

    def attend(self, q, k, v, state, ctx):
        return v.repeat_interleave(q.size(1) // v.size(1), dim=1)[:, :, (ctx.pos_q - 40).clamp(min=0)]


def measured(net):
    """The shares in percent by name, [distances, texts]."""
    cfg = SimpleNamespace(lengths=[LENGTH], train_len=TRAIN_LEN, eval=SimpleNamespace(sequences=3))
    plan = reach.reach(Texts(), cfg)
    assert plan.eval["distances"] == DISTANCES
    (job,) = plan.jobs
    variant = Variant(label="planted", pe={}, scale=1.0, zero_shot=False)
    evaluation = Evaluation(
        kind="reach", run="r", run_id="r", seed=0, train_len=TRAIN_LEN, task=None, step=0, variant=variant, eval={},
        provenance={}, measured=job.run(Scorer(net)),
    )  # fmt: skip
    shares = {}
    for row in evaluation.rows():
        assert row.quantity == "share"
        shares.setdefault(row.part.name, {})[row.length] = row.sample.values[0].tolist()
    return {name: torch.tensor([values[d] for d in DISTANCES]) for name, values in shares.items()}


def test_a_window_of_32_reaches_no_further_than_its_layers():
    # A layer reads 31 tokens back, and two of them 62.
    shares = measured(build_gpt("rope", vocab_size=VOCAB, train_len=TRAIN_LEN, pe={"window": 32}))
    for name in ("attention", "attention in layer 1", "attention in layer 2", "gradient from layer 2 on"):
        assert (shares[name][:2] > 0).all()
        assert (shares[name][2:] == 0).all()
    assert (shares["gradient"][:3] > 0).all()
    assert (shares["gradient"][3:] == 0).all()


def test_what_copies_from_far_is_seen_to():
    net = build_gpt("nope", vocab_size=VOCAB, train_len=TRAIN_LEN)
    net.encodings = [CopiesFromFar(Shape(64, 4, 2, 16, TRAIN_LEN, 2))] * 2
    shares = measured(net)
    for name in ("attention", "attention in layer 1", "attention in layer 2"):
        assert (shares[name][:3] == 100).all()
        assert (shares[name][3:] == 0).all()
    # Two layers read 80 tokens back, and the token itself stays in the residual stream.
    assert torch.equal(shares["gradient"][0], shares["gradient"][2])
    assert ((shares["gradient"] > 0) & (shares["gradient"] < 100)).all()
    assert (shares["gradient from layer 2 on"][2] > 0).all()
    assert (shares["gradient from layer 2 on"][3] == 0).all()
    assert "attend" not in vars(net.encodings[0])


def attend(pe, values):
    """Weights of the last query as the measure finds them [B, H, T], and the output for `values` [.., T, D] in place
    of those it was given."""
    tokens = values.size(-2)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, tokens, 16), torch.randn(2, 2, tokens, 16), torch.randn(2, 2, tokens, 16)
    state = pe.state(torch.randn(2, tokens, 64))
    pos = torch.arange(tokens)
    ctx = make_context(pe, pos, tokens, tokens)
    weights = []
    out = reach._recorder(pe.attend, weights)(q, k, v, state, ctx)
    torch.testing.assert_close(out, pe.attend(q, k, v, state, ctx))
    outs = [pe.attend(q, k, x.expand_as(v), state, ctx) for x in (values, torch.zeros_like(values))]
    return weights[0], (outs[0] - outs[1])[:, :, -1]


def test_weights_are_the_output_for_values_that_name_their_token(encoding):
    # As many tokens as channels, so that channel j of the output is the weight of token j.
    weights, named = attend(build_pe(encoding, n_kv_head=2), torch.eye(16))
    torch.testing.assert_close(weights, named.abs(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotated_values_do_not_change_the_weights(layout):
    weights, _ = attend(build_pe("rope", n_kv_head=2, layout=layout, values=True), torch.eye(16))
    _, named = attend(build_pe("rope", n_kv_head=2, layout=layout), torch.eye(16))
    torch.testing.assert_close(weights, named, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_the_embeddings():
    net = build_gpt("fox", vocab_size=VOCAB, tie_embeddings=False)
    x = torch.stack([torch.randperm(VOCAB)[:20] for _ in range(2)])  # distinct, so that each has a row of its own
    y = torch.full_like(x, IGNORE_INDEX)
    y[:, -1] = 7
    expected = []
    for text, target in zip(x, y, strict=True):
        (rows,) = torch.autograd.grad(net(text[None], targets=target[None]), net.embedding.weight)
        norms = rows[text].norm(dim=-1).double()
        expected.append([norms[: 20 - d].sum() / norms.sum() for d in (1, 5, 19)])
    found = reach.shares(net, x, y[:, -1], (1, 5, 19))["gradient"]
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-5, atol=1e-7)


def test_gates_made_of_the_values_are_refused():
    net = build_gpt("cope", pe={"gates": "values"})
    with pytest.raises(ValueError, match=r"pe\.gates=values"):
        reach.shares(net, torch.arange(8)[None], torch.tensor([1]), [1])
