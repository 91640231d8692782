"""What holds for every encoding. A new YAML under conf/pe is covered without an edit."""

import math
from typing import get_args

import pytest
import torch
from conftest import build_gpt, build_pe, pe_options
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch._dynamo.utils import counters

from conf.schema import options_of
from model import position
from model.position import PositionEncoding

TRAIN_LEN = 16
LENGTH = 40  # beyond train_len, and within reach of a learned table at its default scale


def tokens(length=LENGTH, batch=2):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(2))


def readings(name, train_len=TRAIN_LEN, length=LENGTH, **options):
    """A network for each reading of the encoding, and the longest text it reads up to `length`.

    Its weights are large, as trained ones are: with initial ones attention is flat, and positions hardly matter.
    """
    options = {"init_std": 0.125} | options
    for i in range(len(build_gpt(name, train_len=train_len, **options).encodings[0].readings())):
        net = build_gpt(name, train_len=train_len, **options)
        net.positions = nn.ModuleList(pe.readings()[i] for pe in net.encodings)
        yield net, min(length, net.encodings[0].max_len or length)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item())


def last_logits(net, idx, pieces):
    """{tokens read: logits of the newest}, with a cache and `pieces` tokens at a time."""
    cache, out = net.new_cache(), {}
    for piece in idx.split(pieces, dim=1):
        newest = net(piece, cache)[:, -1]
        out[cache.length] = newest
    return out


@torch.no_grad()
def test_decoding_and_chunked_prefill_equal_the_full_forward(encoding):
    n_layer = 2 if build_pe(encoding).cache_rotated else 1  # in several layers: see the next test
    for net, length in readings(encoding, n_layer=n_layer):
        idx = tokens(length)
        for pieces in (1, [7, 1, length - 8], 13):
            for read, logits in last_logits(net, idx, pieces).items():
                close(logits, net(idx[:, :read])[:, -1])


@torch.no_grad()
def test_angles_that_follow_the_length_change_the_cached_past_a_little(encoding):
    """A second layer's cached keys and values were computed while the text was shorter: inherent, and bounded."""
    for net, length in readings(encoding):
        if net.encodings[0].cache_rotated:
            continue
        idx = tokens(length)
        full = net(idx)[:, -1]
        within = net(idx[:, :TRAIN_LEN])[:, -1]
        decoded = last_logits(net, idx, 1)
        close(decoded[TRAIN_LEN], within)
        assert (decoded[length] - full).abs().max() < 0.05 * full.abs().max()


@torch.no_grad()
def test_the_future_is_invisible(encoding):
    for net, length in readings(encoding):
        idx = tokens(length)
        other = idx.clone()
        other[:, length // 2 :] = 49 - other[:, length // 2 :]
        a, b = net(idx), net(other)
        close(a[:, : length // 2], b[:, : length // 2], 1e-6)
        assert (a[:, -1] - b[:, -1]).abs().max() > 1e-4


@torch.no_grad()
def test_a_long_text_leaves_no_trace(encoding):
    for net, length in readings(encoding):
        alone = net(tokens(8))
        net(tokens(length))
        assert torch.equal(net(tokens(8)), alone)


@torch.no_grad()
def test_relative_encodings_and_only_they_ignore_a_shift_of_all_positions(encoding):
    for net, _ in readings(encoding):
        pe, idx = net.encodings[0], tokens(TRAIN_LEN)
        if pe.max_len is not None and pe.max_len < 1000:  # a table: where it still reaches
            difference = net(idx[:, :4], offset=4) - net(idx[:, :4])
        else:
            difference = net(idx, offset=1000) - net(idx)
        size = net(idx).abs().max()
        assert (difference.abs().max() < 1e-5 * size) == pe.relative


def test_every_parameter_gets_a_gradient(encoding):
    net = build_gpt(encoding, train_len=TRAIN_LEN)
    idx = tokens(TRAIN_LEN + 1)
    net.train().loss(idx[:, :-1], idx[:, 1:]).backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert (p.grad != 0).any(), name


def test_hooks_keep_shapes_and_types(encoding):
    for dtype in (torch.float32, torch.bfloat16):
        pe = build_pe(encoding, train_len=TRAIN_LEN).to(dtype)
        pos_q, pos_k = torch.arange(10, TRAIN_LEN), torch.arange(TRAIN_LEN)
        x = torch.randn(2, 6, 64, dtype=dtype)
        assert pe.embed(x, pos_q).shape == x.shape
        assert pe.embed(x, pos_q).dtype == dtype
        q, k = torch.randn(2, 4, 6, 16, dtype=dtype), torch.randn(2, 2, TRAIN_LEN, 16, dtype=dtype)
        for rotate, y, pos in ((pe.rotate, q, pos_q), (pe.rotate_key, k, pos_k)):
            turned = rotate(y, pe.tables(pos, TRAIN_LEN))
            assert (turned.shape, turned.dtype) == (y.shape, dtype)
        bias = pe.bias(pos_q, pos_k)
        assert bias is None or (bias.shape, bias.dtype) == ((4, 6, TRAIN_LEN), torch.float32)
        ctx = pe.context(pos_q, pos_k, TRAIN_LEN, whole=False)
        assert ctx.scale == pe.temperature / math.sqrt(16)
        held = pe.cached_keys(k, torch.randn(2, TRAIN_LEN, 64, dtype=dtype))
        assert pe.attention(q, held, k, ctx).shape == q.shape
        assert all(isinstance(line, str) for line in pe.describe())


def test_a_reading_shares_the_parameters(encoding):
    pe = build_pe(encoding)
    for reading in pe.readings():
        assert [id(p) for p in reading.parameters()] == [id(p) for p in pe.parameters()]
    assert pe.readings()[0].label.endswith("as trained")
    assert type(pe.reading_for(10**6)) is type(pe)


def test_nothing_but_parameters_is_saved(encoding):
    net = build_gpt(encoding)
    assert set(net.state_dict()) - {"head.weight"} == {name for name, _ in net.named_parameters()}
    assert not list(net.buffers())


def test_the_other_initial_tensors_do_not_depend_on_the_encoding(encoding):
    ours, theirs = (
        {k: v for k, v in build_gpt(name).state_dict().items() if not k.startswith("positions.")}
        for name in (encoding, "nope")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_network_made_on_the_meta_device_starts_the_same(encoding):
    real = build_gpt(encoding)
    with torch.device("meta"):
        net = build_gpt(encoding)
    net.to_empty(device="cpu")
    for p in net.parameters():
        torch.nn.init.constant_(p, torch.nan)
    net.init_weights(0)
    real.init_weights(0)
    assert torch.equal(net(tokens()[:, :TRAIN_LEN]), real(tokens()[:, :TRAIN_LEN]))


@torch.no_grad()
def test_a_checkpoint_trained_at_256_reads_4096(encoding):
    size = dict(n_layer=1, n_head=2, n_kv_head=1, dim=16)
    trained = build_gpt(encoding, train_len=256, **size)
    options, pe = pe_options(encoding), trained.encodings[0]
    # A size that follows train_len when it is null stays what it was in training.
    kept = {k: getattr(pe, k) for k, v in options.items() if v is None and isinstance(getattr(pe, k, None), int)}
    longer = {"scale": 16.0} if "scale" in options else {}
    net = build_gpt(encoding, train_len=4096, pe=kept | longer, seed=1, **size)
    net.load_state_dict(trained.state_dict(), strict=True)
    cache = net.new_cache()
    for piece in tokens(4096, batch=1).split(512, dim=1):
        assert net(piece, cache).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_stays_near_fp32(encoding, precision):
    for net, length in readings(encoding):
        exact = net(tokens(length))
        if precision == "bf16-true":
            net.to(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
            rounded = net(tokens(length)).float()
        assert rounded.isfinite().all()
        assert (rounded - exact).abs().mean() < 0.05 * exact.abs().max()


@torch.no_grad()
def test_compiled_equals_eager_with_two_graphs_for_five_lengths(encoding):
    *_, (net, length) = readings(encoding, n_layer=1)
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch._dynamo.reset()
    counters.clear()
    for t in (length, length - 3, 9, 12, length - 7):
        torch.testing.assert_close(compiled(tokens(t)), net(tokens(t)), rtol=0, atol=1e-5)
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


@torch.no_grad()
def test_no_option_is_accepted_and_ignored(encoding):
    """Every option changes what the network computes: in some reading, of a short or of a long text."""
    size = dict(train_len=256, length=300)

    def outputs(**options):
        return [net(tokens(t)) for net, length in readings(encoding, pe=options, **size) for t in (8, length)]

    def differ(a, b):
        return len(a) != len(b) or any(x.shape != y.shape or not torch.equal(x, y) for x, y in zip(a, b, strict=True))

    base = outputs()
    options = pe_options(encoding)
    for name, (annotation, _) in options_of(position.resolve(options["_target_"])).items():
        verdicts = []
        for value in candidates(options[name], annotation):
            try:
                verdicts.append(differ(outputs(**{name: value}), base))
            except ValueError:  # out of the option's range
                continue
        assert verdicts, f"no other value of pe.{name} is accepted"
        assert any(verdicts), f"pe.{name} is ignored"
        assert all(verdicts) or not isinstance(options[name], str | bool), f"a choice of pe.{name} is ignored"


def candidates(value, annotation):
    """Other values of an option's type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, str):
        yield from (choice for choice in get_args(annotation) if choice != value)
    elif value is not None:
        yield from (type(value)(value * factor) for factor in (0.1, 0.5, 2, 10))
    else:
        for other in (8, 128, 2.0, [2.0] * 8):
            try:
                yield TypeAdapter(annotation).validate_python(other, strict=True)
            except ValidationError:
                continue


def test_the_yaml_lists_every_option(encoding):
    options = pe_options(encoding)
    cls = position.resolve(options.pop("_target_"))
    assert options.pop("name") == encoding
    assert issubclass(cls, PositionEncoding)
    assert set(options) == set(options_of(cls))


@torch.no_grad()
def test_the_default_dtype_changes_no_position(encoding):
    """Lightning makes bf16 the default dtype in training with bf16-true, not in evaluation."""
    pos = torch.arange(2000, 2040)
    pe = build_pe(encoding)
    if pe.max_len is not None and pe.max_len < 2040:
        pos = pos - 2000
        pe = pe.readings()[-1]
    expected = pe.tables(pos, int(pos[-1]) + 1), pe.bias(pos, pos)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = pe.tables(pos, int(pos[-1]) + 1), pe.bias(pos, pos)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
