"""Markov texts: their law and their best loss by enumeration, and predictors that reach it or stay above it."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, build_gpt
from omegaconf import OmegaConf
from scipy.special import betaln, gammaln, roots_jacobi
from scipy.stats import chisquare

from data.base import IGNORE_INDEX, build_data
from data.tasks.markov import Markov
from evaluation.scoring import Scorer

VARIANTS = [
    {},
    {"order": 2},
    {"lag": 3},
    {"switch": 0.15},
    {"order": 2, "lag": 2},
    {"lag": 2, "switch": 0.4},
    {"order": 2, "switch": 0.05},
]


def name_of(options):
    return " ".join(f"{key}={value}" for key, value in options.items()) or "plain"


every_variant = pytest.mark.parametrize("options", VARIANTS, ids=name_of)


def log_probability(tokens, data):
    """Of a text, in closed form: a Dirichlet-multinomial for each context of each piece, summed over all ways to cut
    the text into pieces that have a chain of their own."""
    first = data.lag + data.order - 1
    places = range(first, len(tokens))
    total = 0.0
    for cuts in itertools.product((False, True), repeat=max(0, len(places) - 1)):
        pieces = [[]]
        for place, cut in zip(places, (False, *cuts), strict=False):
            if cut:
                pieces.append([])
            pieces[-1].append(place)
        log_p = 0.0
        for cut in cuts:
            chance = data.switch if cut else 1 - data.switch
            log_p += math.log(chance) if chance else -math.inf
        for piece in pieces:
            followers = {}
            for place in piece:
                context = tuple(tokens[place - data.lag - i] for i in range(data.order))
                followers.setdefault(context, [0] * data.symbols)[tokens[place]] += 1
            for counts in followers.values():
                prior = [data.alpha] * data.symbols
                log_p += gammaln(sum(prior)) - gammaln(sum(prior) + sum(counts))
                log_p += sum(gammaln(a + c) - gammaln(a) for a, c in zip(prior, counts, strict=True))
        total += math.exp(log_p)
    return math.log(total) - min(first, len(tokens)) * math.log(data.symbols)


@every_variant
def test_the_optimum_is_that_of_enumeration(options):
    data = Markov(symbols=3, alpha=0.4, **options)
    tokens = data.draw("any", range(3), 8)
    x, y = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:].copy())
    found = data.optimum(x, y)
    assert found.dtype == torch.float64
    for text, losses in zip(tokens.tolist(), found.tolist(), strict=True):
        logs = [log_probability(text[:n], data) for n in range(1, len(text) + 1)]
        np.testing.assert_allclose(losses, -np.diff(logs), rtol=1e-10)
    y[:, :5] = IGNORE_INDEX
    torch.testing.assert_close(data.optimum(x, y), found * (torch.arange(8) >= 5))
    y[:, -1] = IGNORE_INDEX
    scored = (torch.arange(8) >= 5) & (torch.arange(8) < 7)
    torch.testing.assert_close(data.optimum(x, y), found * scored)


@every_variant
def test_texts_are_distributed_as_if_their_chain_was_drawn_first(options):
    data = Markov(symbols=2, alpha=0.3, **options)
    length = 6
    tokens = data.draw("law", range(20_000), length)
    kinds = tokens @ 2 ** np.arange(length + 1)
    counts = np.bincount(kinds, minlength=2 ** (length + 1))
    texts = [[kind >> i & 1 for i in range(length + 1)] for kind in range(len(counts))]
    expected = np.array([math.exp(log_probability(text, data)) for text in texts])
    assert expected.sum() == pytest.approx(1)
    assert chisquare(counts, expected * len(tokens)).pvalue > 1 / 3000


def test_chains_that_are_drawn_first_have_this_optimum():
    """Texts made the other way, from a matrix, and its closed-form prediction: neither knows the urns."""
    data = Markov(symbols=4, alpha=0.5)
    rng = np.random.default_rng(0)
    tokens = np.empty((500, 41), dtype=np.int64)
    for text in tokens:
        matrix = rng.dirichlet([data.alpha] * 4, size=4)
        text[0] = rng.integers(4)
        for t in range(40):
            text[t + 1] = rng.choice(4, p=matrix[text[t]])
    losses = data.optimum(torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])).mean(1)
    drawn = data.draw("other", range(500), 40)
    others = data.optimum(torch.from_numpy(drawn[:, :-1]), torch.from_numpy(drawn[:, 1:])).mean(1)
    error = math.sqrt((losses.var() + others.var()) / 500)
    assert abs(losses.mean() - others.mean()) < 4 * error


def test_the_end_of_a_text_tells_hardly_more_than_is_counted():
    """The first symbol of a text that was cut is drawn from the chain's own frequencies. With two symbols the best loss
    is an integral over two probabilities: all targets together gain less than the bound in `optimum`."""
    alpha, length = 0.2, 8
    data = Markov(symbols=2, alpha=alpha)
    nodes, weights = roots_jacobi(60, alpha - 1, alpha - 1)
    p = (nodes + 1) / 2
    weights = weights / weights.sum()
    away, back = p[:, None], p[None]  # probabilities of 0 -> 1 and of 1 -> 0
    weight = weights[:, None] * weights[None]
    ones = away / (away + back)  # share of ones in a long text
    entropy = -(ones * np.log(ones) + (1 - ones) * np.log(1 - ones))
    bound = math.log(2) - float((weight * entropy).sum())
    gains = np.zeros(length)
    for text in itertools.product((0, 1), repeat=length + 1):
        likelihood = np.where(text[0], ones, 1 - ones)
        exact = [float((weight * likelihood).sum())]
        for a, b in itertools.pairwise(text):
            leave = back if a else away
            likelihood = likelihood * (leave if a != b else 1 - leave)
            exact.append(float((weight * likelihood).sum()))
        tokens = torch.tensor([text])
        counted = data.optimum(tokens[:, :-1], tokens[:, 1:])[0].numpy()
        gains += exact[-1] * (counted + np.diff(np.log(exact)))
    assert (gains > -1e-9).all()
    assert gains[-1] < gains[0] / 4
    assert 0 < gains.sum() < bound
    # With one symbol read, the posterior is a ratio of Beta functions.
    x, y = torch.tensor([[0, 0]]), torch.tensor([[0, 1]])
    stay_then_leave = math.exp(betaln(alpha + 1, alpha + 1) - betaln(alpha, alpha + 1))
    assert float(data.optimum(x, y)[0, 1]) == pytest.approx(-math.log(stay_then_leave))


class Counter(torch.nn.Module):
    """In the place of a network: it counts what follows what, in the pieces of a text that may have one chain, and its
    logits are the logarithms of its probabilities."""

    context_parallel = None

    def __init__(self, data):
        super().__init__()
        self.data, self.embedding = data, torch.nn.Embedding(1, 1)

    def documents(self, x):
        return None

    def in_pieces(self, function, hidden, targets):
        return [function(hidden, targets)]

    def hidden_states(self, x, documents):
        return torch.stack([torch.tensor(self.read(text), dtype=torch.float32) for text in x.tolist()])

    def read(self, text):
        data, logits = self.data, []
        starts = {}  # place at which the chain was drawn last: its probability, and the counts since then
        for place in range(1, len(text) + 1):
            if place < data.lag + data.order - 1:
                logits.append([0.0] * data.symbols)
                continue
            if place == data.lag + data.order - 1:
                starts = {place: (1.0, {})}
            elif data.switch:
                starts = {start: (p * (1 - data.switch), counts) for start, (p, counts) in starts.items()}
                starts[place] = (data.switch, {})
            context = tuple(text[place - data.lag - i] for i in range(data.order))
            rows = {start: counts.get(context, [0] * data.symbols) for start, (_, counts) in starts.items()}
            odds = {
                start: [(c + data.alpha) / (sum(row) + data.symbols * data.alpha) for c in row]
                for start, row in rows.items()
            }
            mixed = [sum(p * odds[start][s] for start, (p, _) in starts.items()) for s in range(data.symbols)]
            logits.append([math.log(p) for p in mixed])
            if place == len(text):
                break
            symbol = text[place]
            for start, (p, counts) in starts.items():
                starts[start] = (p * odds[start][symbol] / mixed[symbol], counts)
                counts.setdefault(context, [0] * data.symbols)[symbol] += 1
        return logits


@every_variant
def test_a_predictor_that_counts_reaches_the_optimum_at_every_length(options):
    data = Markov(symbols=4, **options)
    parts = data.eval_sets([16, 32, 64, 128], target_tokens=8, sequences=12)
    bits = []
    for part in parts:
        best = data.optimum(*part.batch(0, part.n))
        found = Scorer(Counter(data))(part)
        assert (found.tokens == [[8, 0]] * 12).all()
        assert not found.bytes.any()  # bits per token
        np.testing.assert_allclose(found.nats[:, 0] / 8, best.sum(1).numpy() / 8, atol=1e-3)
        bits.append(float(best.sum()))
    assert bits[-1] < 0.9 * bits[0] or data.switch  # more text helps


@pytest.mark.parametrize("options", [{}, {"switch": 0.1}], ids=name_of)
def test_no_trained_network_is_below_the_optimum(options):
    """One that was trained for a moment is clearly better than a guess, and not better than the best."""
    data = Markov(symbols=2, alpha=0.3, **options)
    net = build_gpt("alibi", vocab_size=2, dim=32, n_layer=2, init_std=0.1, train_len=32).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for step in range(80):
        x, y = data.train_batch(range(32 * step, 32 * step + 32), 32, seed=0)
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for part in data.eval_sets([16, 32, 64], target_tokens=8, sequences=400):
        best = data.optimum(*part.batch(0, part.n)).sum(1).numpy() / 8
        found = Scorer(net)(part).nats[:, 0] / 8
        above = found - best
        error = above.std(ddof=1) / math.sqrt(part.n)
        assert above.mean() > -2 * error
        assert above.mean() > 0
        if part.length <= 32:
            assert found.mean() < math.log(2) - 0.1


def test_the_same_last_targets_at_every_length():
    data = Markov(order=2, switch=0.1)
    parts = data.eval_sets([16, 64, 40], target_tokens=5, sequences=7)
    assert [(p.name, p.length, p.n) for p in parts] == [("text", 16, 7), ("text", 64, 7), ("text", 40, 7)]
    assert len({p.texts_hash for p in parts}) == 1
    longest = parts[1].batch(0, 7)
    for part in parts:
        x, y = part.batch(0, 7)
        assert x.shape == y.shape == (7, part.length)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x, longest[0][:, -part.length :])
        assert torch.equal(y[:, -5:], longest[1][:, -5:])
        assert torch.equal(y[:, -6:-1][:, 1:], x[:, -4:])
        assert (y[:, :-5] == IGNORE_INDEX).all()
        for start, stop in ((3, 5), (6, 7)):
            again = part.batch(start, stop)
            assert torch.equal(again[0], x[start:stop])
            again[0].zero_()  # is the caller's own
            again[1].zero_()
            assert torch.equal(part.batch(start, stop)[0], x[start:stop])
            assert torch.equal(part.batch(start, stop)[1], y[start:stop])
    whole = data.fully_scored(64, 7)
    assert torch.equal(whole.batch(0, 7)[0], longest[0])
    assert (whole.batch(0, 7)[1] != IGNORE_INDEX).all()
    other = data.eval_sets([16, 32], target_tokens=5, sequences=7)[0]
    assert other.texts_hash != parts[0].texts_hash  # the texts end elsewhere


@every_variant
def test_a_text_depends_on_its_index_and_split_alone(options):
    data = Markov(**options)
    x, y = data.train_batch(range(100, 160), 32, seed=0)
    assert torch.equal(x[:, 1:], y[:, :-1])
    one = data.train_batch([117], 32, seed=0)
    assert torch.equal(one[0][0], x[17])
    assert torch.equal(one[1][0], y[17])
    shorter, _ = data.train_batch(range(100, 160), 16, seed=0)
    assert torch.equal(shorter, x[:, :16])
    samples = [x, data.train_batch(range(100, 160), 32, seed=1)[0], data.validation(32, 60 * 32).batch(0, 60)[0]]
    samples.append(data.eval_sets([32], target_tokens=1, sequences=60)[0].batch(0, 60)[0])
    rows = [tuple(row) for sample in samples for row in sample.tolist()]
    assert len(set(rows)) == len(rows) == 240
    assert data.validation(32, 5).n == 1


def test_texts_are_those_of_this_version():
    """Whoever changes them raises `version`: a run would not continue, nor be evaluated, on what it began with."""
    assert Markov.version == 1
    for options, first in FIRST.items():
        x, _ = Markov(**dict(options)).train_batch([3], 16, 0)
        assert "".join(map(str, x[0].tolist())) == first


FIRST = {
    (): "0453804073739999",
    (("order", 2),): "0453805083549987",
    (("lag", 3),): "0453805070549987",
    (("switch", 0.15),): "0453805073739999",
}


@pytest.mark.parametrize(
    ("option", "values"),
    [("symbols", [1, 129]), ("alpha", [0, 1e9]), ("order", [0, 3]), ("lag", [0]), ("switch", [-0.1, 1.1])],
)
def test_bad_options(option, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"data\.{option}=.* must be "):
            Markov(**{option: value})


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"data\.symbols=26 must be at most 25 with data\.order=2"):
        Markov(symbols=26, order=2)
    data = Markov(lag=15, order=2)
    with pytest.raises(ValueError, match=r"more than 16 tokens .*, not 16: choose train_len and eval\.lengths"):
        data.train_batch([0], 16, 0)
    assert data.train_batch([0], 17, 0)[0].shape == (1, 17)


def test_every_symbol_is_uniform_where_chains_change_at_once():
    data = Markov(switch=1.0)
    x, y = data.train_batch(range(200), 64, 0)
    torch.testing.assert_close(data.optimum(x, y), torch.full((200, 64), math.log(10), dtype=torch.double))
    assert chisquare(np.bincount(x[:, 1:].flatten())).pvalue > 1 / 3000


def test_symbols_are_text_and_options_are_recorded():
    options = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "data" / "markov.yaml"))
    data = build_data(options)
    ids = data.train_batch([0], 64, 0)[0][0].tolist()
    assert data.encode(data.decode(ids)) == ids
    with pytest.raises(ValueError, match="'xyz' is not a symbol of this data; there is: s0 s1 "):
        data.encode("s1 xyz")
    identity = data.identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity["options"] == {key: value for key, value in options.items() if key not in ("name", "_target_")}
    assert data.tokenizer_identity().items() <= identity.items()
    assert data.task is None
    assert "best possible loss at 64 tokens" in " ".join(data.describe(64))
