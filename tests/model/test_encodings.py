"""What holds for every encoding, alone and as a part of a pattern over layers. A new YAML needs no edit here."""

import math
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name

import pytest
import torch
from conftest import (
    ENCODINGS,
    at_last_scale,
    attend,
    build_gpt,
    build_pe,
    context,
    gradients_of,
    layer_gradients,
    normal,
    pe_options,
    read_at,
    tokens,
)
from torch._dynamo.utils import counters
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from conf.plugins import constructor_options
from lab.benchmarks.measure import peak_memory
from model import gpt, position
from model.cache import Cache
from model.gpt import GPT
from model.layout import Layout, packed
from model.position import PositionEncoding
from model.position.layer import make_context
from model.position.network import exact_above, max_len_of, scales_of, view

TRAIN_LEN = 16
LENGTH = 40  # beyond train_len, and within reach of a learned table at its default scale
WINDOW = 8
END = 49  # the token that ends a document

ALONE = [name for name in ENCODINGS if "pattern" not in pe_options(name)]
GATED = [name for name in ALONE if "gates" in pe_options(name)]
HOOKS = ("embed", "tables", "state", "rotate", "bias", "attend")


def slow_if_repeated(names, place="") -> list:
    """The names, slow if their hooks are all those of an earlier one; and long if they have a place."""
    seen = set()
    cases = []
    for name in names:
        first_part, *_ = position.parts(pe_options(name)).values()
        cls = resolve_name(first_part["_target_"])
        hooks = tuple(getattr(cls, hook) for hook in HOOKS)
        marks = [pytest.mark.long] if place else []
        if hooks in seen:
            marks.append(pytest.mark.slow)
        seen.add(hooks)
        cases.append(pytest.param(name + place, marks=marks))
    return cases


each_kind = pytest.mark.parametrize("name", slow_if_repeated(ALONE))

# A place is one of the options below, which decide what is learned, cached or rotated; or a part of a pattern.
OPTIONS = {
    "": {},
    "own gates": {"gates": "projection", "npos_max": 5},
    "shared": {"gates": "values", "shared": True},
    "turned values": {"values": True},
    "constant gates": {"constant_gates": True},
    "learned slopes": {"learned": True},
}
PARTS = {
    "local": ("rope", {"window": WINDOW}),
    "global": ("nope", {}),
}
PLACES = [
    *ENCODINGS,
    *slow_if_repeated(ALONE, "-local"),
    *slow_if_repeated(ALONE, "-global"),
    *slow_if_repeated(GATED, "-own gates"),
    *slow_if_repeated(GATED, "-shared"),
    *slow_if_repeated(["rope", "cope_rope"], "-turned values"),
    *slow_if_repeated(["fox", "gated_delta", "path_fox"], "-constant gates"),
    *slow_if_repeated(["alibi"], "-learned slopes"),
]


@pytest.fixture(params=PLACES)
def placed(request) -> dict:
    """Options of a network with each encoding: in all layers, in those with a sliding window, or in the others."""
    name, _, place = request.param.partition("-")
    if place in OPTIONS:
        return {"name": name, "pe": OPTIONS[place]}
    parts = {}
    for part, (other, options) in PARTS.items():
        parts[part] = pe_options(name if part == place else other, **options)
    return {"name": "hybrid", "pe": {"pattern": list(PARTS), **parts}}


def network(name, pe=None, **cfg) -> GPT:
    """A network whose weights are large, as trained ones are: with initial ones positions hardly matter."""
    cfg = {"train_len": TRAIN_LEN, "init_std": 0.125} | cfg
    return build_gpt(name, pe=pe, **cfg)


def at_scales(net, longest=LENGTH):
    """At each scale that an evaluation measures: the network, and the longest text up to `longest` that it can read."""
    for scale in scales_of(net.encodings):
        encodings = read_at(net, scale)
        length = min(longest, max_len_of(encodings) or longest)
        yield partial(net, encodings=encodings), length


def layer_inputs(length, dim=64, head_dim=16):
    """q of four heads, k and v of two, and the input of the layer."""
    return normal(
        (2, 4, length, head_dim),
        (2, 2, length, head_dim),
        (2, 2, length, head_dim),
        (2, length, dim),
    )


def close(found, expected, tolerance=1e-5):
    """Equal, relative to the largest expected number."""
    largest = expected.abs().max().item()
    assert_close(found, expected, rtol=0, atol=tolerance * largest)


@torch.no_grad()
@pytest.mark.parametrize("n_layer", [pytest.param(1, marks=pytest.mark.long), 2])
def test_reading_a_text_in_pieces_gives_the_logits_of_the_whole_text(placed, n_layer):
    """A prompt in pieces, and one token after the other."""
    net = network(**placed, n_layer=n_layer)
    for read, length in at_scales(net):
        idx = tokens(length)
        whole = read(idx)
        # Angles that follow the length of the text differ for the past: in a second layer the cache then holds what was
        # computed while the text was shorter. That is inherent, and bounded.
        beginning = read(idx[:, :8])
        is_exact = n_layer == 1 or torch.allclose(beginning, whole[:, :8], atol=1e-3)

        for sizes in ([7, 1, length - 12, 1, 1, 1, 1], 13):
            cache = Cache()
            for piece in idx.split(sizes, dim=1):
                newest = read(piece, cache=cache)[:, -1]
                if is_exact or cache.length <= TRAIN_LEN:
                    so_far = read(idx[:, : cache.length])
                    close(newest, so_far[:, -1])
            close(newest, whole[:, -1], 0.05)


@torch.no_grad()
def test_logits_depend_on_no_later_token_and_on_no_text_read_before(placed):
    net = network(**placed)
    for read, length in at_scales(net):
        idx = tokens(length)
        first, second = idx.chunk(2, dim=1)
        half = first.size(1)
        other_end = torch.cat((first, 49 - second), dim=1)
        short = read(tokens(8))

        logits = read(idx)
        other_logits = read(other_end)

        close(logits[:, :half], other_logits[:, :half], 1e-6)

        assert not torch.allclose(
            logits[:, -1],
            other_logits[:, -1],
            rtol=0,
            atol=1e-4,
        )
        assert torch.equal(read(tokens(8)), short)


@torch.no_grad()
def test_packed_documents_are_read_as_if_each_was_alone(placed):
    assert_read_alone(network(**placed | {"train_len": LENGTH}))


@pytest.mark.parametrize("scaling", ["dynamic_ntk", "longrope"])
@torch.no_grad()
def test_packed_documents_are_as_long_as_they_are(scaling):
    """Some are longer than original_len, others only with their padding, where these two rotate otherwise."""
    pe = {"original_len": 21, "scale": 4.0}
    net = network(scaling, train_len=LENGTH, pe=pe)
    assert_read_alone(net, exact_above(net.encodings))


def assert_read_alone(net, longest=None):
    """Documents of 1 to 40 tokens, packed, have the logits that each has alone."""
    sizes_of_rows = [[40], [17, 23], [3, 1, 20, 2, 14]]
    idx = tokens(LENGTH, 3) % END
    documents = []
    for row, sizes in zip(idx, sizes_of_rows, strict=True):
        for document in row.split(sizes):
            document[-1] = END
            documents.append(document)

    logits = net(idx, packed(idx, END, longest))

    alone = [net(document[None])[0] for document in documents]

    close(logits.flatten(0, 1), torch.cat(alone))


@torch.no_grad()
def test_absolute_encodings_and_only_they_notice_a_shift_of_all_positions(encoding):
    net = network(encoding)
    is_absolute = any(type(pe).embed is not PositionEncoding.embed for pe in net.encodings)

    for read, longest in at_scales(net, 1000):
        n = 4 if longest == TRAIN_LEN else TRAIN_LEN
        first = min(100, longest - n)
        positions = torch.arange(first, first + n)
        logits = read(tokens(n))
        shifted = read(tokens(n), Layout((positions, n)))
        tolerance = 1e-5 * logits.abs().max().item()

        assert torch.allclose(
            shifted,
            logits,
            rtol=0,
            atol=tolerance,
        ) == (not is_absolute)


@torch.no_grad()
def test_nothing_but_parameters_is_saved_and_an_encoding_changes_no_other_weight(encoding):
    """So that encodings are compared from the same initial weights."""
    net = build_gpt(encoding)
    weights = net.state_dict()
    parameters = dict(net.named_parameters())
    others = {name: value for name, value in weights.items() if "position" not in name}

    assert weights.keys() - {"head.weight"} == parameters.keys()
    assert not list(net.buffers())
    assert_close(others, dict(build_gpt("nope").state_dict()), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_logits_in_bf16_stay_near_those_in_fp32(encoding, precision):
    net = network(encoding)
    exact = [read(tokens(length)) for read, length in at_scales(net)]
    if precision == "bf16-true":
        net.to(torch.bfloat16)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        rounded = [read(tokens(length)) for read, length in at_scales(net)]

    for found, expected in zip(rounded, exact, strict=True):
        error = (found - expected).abs().mean()
        assert error < 0.05 * expected.abs().max()  # nor is it NaN


def test_every_parameter_has_a_gradient_which_is_that_of_numerical_differentiation(placed):
    """In float64, along a random direction. A number rounded to fp32 on the way would be an error of 1e-1."""
    net = network(**placed, dim=16, n_head=2, n_kv_head=1).double()
    for name, p in net.named_parameters():
        if name.endswith("delta"):
            p.data.fill_(-1.0)  # PoPE's starts at its limit, beyond which the loss does not change
    x, y = tokens(TRAIN_LEN, 4).split(2)
    parameters = list(net.parameters())
    gradients = gradients_of(net(x, targets=y), net)
    directions = normal(*[p.shape for p in parameters], dtype=torch.float64)

    @torch.no_grad()
    def loss(p, step):
        start = p.clone()
        p.add_(step)
        loss = net(x, targets=y)
        p.copy_(start)
        return loss

    for p, gradient, direction in zip(parameters, gradients, directions, strict=True):
        step = 1e-6 * direction
        slope = (loss(p, step) - loss(p, -step)) / 2e-6
        expected = (gradient * direction).sum()

        assert_close(slope, expected, rtol=2e-6, atol=2e-9)
        assert gradient.any()


@each_kind
@pytest.mark.parametrize("length", [40, pytest.param(300, marks=pytest.mark.long)])
def test_gradients_in_bf16_are_near_those_in_float64(name, length):
    """Those of an encoding's parameters, too: gates sum up gradients that nearly cancel."""
    pe = build_pe(name, train_len=length, head_dim=32, n_kv_head=2)
    in_float64 = build_pe(name, train_len=length, head_dim=32, n_kv_head=2).double()
    *qkv, x = layer_inputs(length, head_dim=32)
    qkv = [tensor.bfloat16() for tensor in qkv]
    (weights,) = normal((2, 4, length, 32), seed=3)
    exact_inputs = [tensor.double() for tensor in (*qkv, x, weights)]

    found = layer_gradients(pe, *qkv, x, weights, autocast=torch.bfloat16)
    expected = layer_gradients(in_float64, *exact_inputs)

    # Of q, k, weights, outputs and the gradients of all these, and where they are rotated or projected: on the way to a
    # gradient at most eight numbers are rounded, by 2^-9 each.
    limit = 8 * 2.0**-9
    for key, exact in expected.items():
        # The bias of all scores of a head changes no softmax, and what FIRE's network has from c and its last weights
        # is such a bias, nearly.
        if name != "fire" or key in "qkv":
            error = found[key].double() - exact
            assert error.norm() < limit * exact.norm(), key


@pytest.mark.long
@pytest.mark.parametrize("name", slow_if_repeated(ENCODINGS))
def test_compiled_gradients_equal_eager_ones_with_two_graphs_for_three_lengths(name):
    net = network(name, n_layer=1).train()
    *_, (read, longest) = at_scales(net)
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch._dynamo.reset()
    counters.clear()

    for length in (longest, 9, 12):
        x = tokens(length)
        loss = compiled(x, **read.keywords, targets=x)
        found = gradients_of(loss, net)
        expected = gradients_of(read(x, targets=x), net)

        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6

    assert 1 <= counters["stats"]["unique_graphs"] <= 2


@each_kind
@torch.no_grad()
def test_a_key_beyond_the_window_has_no_influence_and_the_cache_forgets_it(name):
    net = network(name, pe={"window": WINDOW}, n_layer=1)
    seen = WINDOW + net.encodings[0].lookback
    changed = 3
    end = changed + seen  # the first token that does not see it
    for read, length in at_scales(net):
        idx = tokens(length)
        other = idx.clone()
        other[:, changed] = 49 - idx[:, changed]
        difference = read(idx) - read(other)
        by_token = difference.abs().amax((0, 2))  # [T]

        assert by_token[changed:end].all()
        assert by_token[end:].max() < 1e-6 * read(idx).abs().max()

        cache = Cache()
        for token in idx.split(1, dim=1):
            read(token, cache=cache)
        for held in cache._held.values():
            for x in held.values():
                assert x.size(1) <= seen


@pytest.mark.parametrize("window", [None, WINDOW])
@each_kind
@torch.no_grad()
def test_a_text_without_some_tokens_weighs_the_others_as_the_whole_text_does(name, window):
    """With one exception: where a score depends on the tokens between, there is no whole text to compare with."""
    n = 16
    everywhere = torch.arange(n)
    kept = torch.tensor([0, 1, 4, 5, 9, 12, 15])
    is_other = torch.ones(n, 1).index_fill(0, kept, 0.0)
    options = {"max_distance": 4} if "beyond" in pe_options(name) else {}  # the gaps lie beyond it
    trained = build_pe(name, n_kv_head=2, train_len=n, window=window, **options)
    q, k, _, x = layer_inputs(n)
    v = torch.eye(n).expand(2, 2, n, n)  # so that what comes out are the weights of the keys

    def weights(pe, k, x, pos):
        """Of the kept tokens alone, of those that are read, at `pos`: [B, H, 7, 7]."""
        ctx = make_context(pe, pos, len(pos), n)
        read = [tensor[:, :, pos] for tensor in (q, k, v)]
        out = attend(pe, *read, x[:, pos], ctx)
        of_kept = out[:, :, torch.isin(pos, kept), :][..., kept]
        return of_kept / of_kept.sum(-1, keepdim=True)

    for scale in trained.scales:
        pe = view(trained, active_scale=scale)
        whole = weights(pe, k, x, everywhere)
        others_changed = weights(
            pe,
            k + is_other,
            x + is_other,
            everywhere,
        )
        if torch.allclose(whole, others_changed, atol=1e-4):
            close(weights(pe, k, x, kept), whole)

        embedded = pe.embed(x, everywhere)
        close(embedded[:, kept], pe.embed(x[:, kept], kept))


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else [out]
        sizes = [x.numel() for x in made if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.long
def test_no_tensor_of_a_training_step_grows_with_the_square_of_the_length(placed):
    if placed["name"] == "hybrid":  # whose own window is a share of train_len
        local = pe_options("rope", window=WINDOW)
        placed = {"name": "hybrid", "pe": {"local": local} | placed["pe"]}
    size = {"n_layer": 2, "n_head": 2, "n_kv_head": 1, "dim": 8}
    largest = []
    for length in (384, 768):
        net = build_gpt(**placed, train_len=length, **size).train()
        idx = tokens(length, 1)
        with Largest() as made:
            net(idx, targets=idx).backward()
        largest.append(made.elements)

    assert largest[1] <= 2.2 * largest[0]


@pytest.mark.long
@pytest.mark.parametrize("name", slow_if_repeated(ENCODINGS))
def test_checkpointing_is_the_same_training_in_half_of_the_memory(name, monkeypatch):
    """Loss and gradients, with dropout."""
    monkeypatch.setattr(gpt, "MAX_LOGITS", 2**16)
    x, y = tokens(128, 4, 4096).split(2)
    size = {
        "n_layer": 6,
        "n_head": 2,
        "n_kv_head": 1,
        "dim": 32,
        "vocab_size": 4096,
        "train_len": 128,
    }
    results = []
    peaks = []
    for checkpointing in (False, True):
        net = network(name, dropout=0.2, checkpointing=checkpointing, **size).train()

        def step(net=net):
            torch.manual_seed(0)
            loss = net(x, targets=y)
            results.append([loss.detach(), *gradients_of(loss, net)])

        peaks.append(peak_memory(step, "cpu"))

    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()

    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize("name", ALONE)
def test_the_yaml_lists_every_option(name):
    options = pe_options(name)
    cls = resolve_name(options.pop("_target_"))

    assert options.pop("name") == name
    assert options.keys() == constructor_options(cls).keys()


@each_kind
@torch.no_grad()
def test_sinks_take_part_in_the_softmax_of_every_encoding_that_has_one(name):
    """Values of one come out as sigmoid(logsumexp - sink), so the logits of what comes out differ as the sinks do."""
    trained = build_pe(name, n_kv_head=2, train_len=TRAIN_LEN)
    if not trained.has_softmax:
        with pytest.raises(ValueError, match=f"a softmax, which {type(trained).__name__} lacks"):
            build_gpt(name, sinks=True)
        return
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for scale in trained.scales:
        pe = view(trained, active_scale=scale)
        n = min(LENGTH, pe.max_len or LENGTH)
        q, k, _, x = layer_inputs(n)

        def logits(sinks, pe=pe, q=q, k=k, x=x):
            ctx = replace(context(pe, q.size(2)), sinks=sinks)
            out = attend(pe, q, k, torch.ones_like(k), x, ctx)
            return out.double().logit()

        of_zeros = logits(torch.zeros(4))
        as_zeros = logits(sinks) + sinks[:, None, None]

        assert_close(as_zeros.sigmoid(), of_zeros.sigmoid(), rtol=0, atol=1e-4)
        assert of_zeros.max() - of_zeros.min() > 0.4


@torch.no_grad()
@pytest.mark.parametrize(
    "ours", ["rope", "fox", "pope", "selective_rope", "path", "stick_breaking", "dca", "sinks_window"]
)
def test_a_temperature_is_a_factor_of_the_scores(ours):
    """Also of those that are made of softplus(q)."""
    plain = at_last_scale(build_pe(ours, n_kv_head=2, train_len=TRAIN_LEN))
    pe = at_last_scale(build_pe(ours, n_kv_head=2, train_len=TRAIN_LEN, temperature="log"))
    q, k, v, x = layer_inputs(LENGTH)
    newest = q[:, :, -1:]

    found = attend(pe, newest, k, v, x)

    hides_keys = ours.endswith("window")  # all but as many as training has met
    factor = 1 if hides_keys else math.log(LENGTH) / math.log(TRAIN_LEN)
    ctx = context(plain, LENGTH, 1)
    with_factor = replace(ctx, scale=ctx.scale * factor)

    close(found, attend(plain, newest, k, v, x, with_factor))


@torch.no_grad()
def test_the_default_dtype_changes_no_position(encoding, request):
    """Training with bf16-true may make bf16 the default dtype; evaluation does not."""
    pe = at_last_scale(build_pe(encoding))
    length = min(2040, pe.max_len or 2040)
    positions = torch.arange(length)
    expected = pe.tables(positions, length)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)

    assert_close(pe.tables(positions, length), expected, rtol=0, atol=0)
