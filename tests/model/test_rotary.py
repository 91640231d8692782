"""The rotary family against transformers, and against definitions written out as loops in float64."""

import itertools
import math

import pytest
import torch
from conftest import ENCODINGS, at_last_scale, build_gpt, build_pe, pe_options
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from app.init_from import resolve, train_values
from model import position
from model.gpt import GPT
from model.position import Shape
from model.position.layer import attend, make_context
from model.position.rotary import Rotary
from model.position.scaled_rotary import ScaledRotary
from model.position.windowed import TrainingFree

GRID = list(itertools.product([8, 128], [64, 8192], [1.0, 1.5, 32.0], [10_000.0, 500_000.0]))


def class_of(name):
    return position.resolve(pe_options(name).get("_target_", "model.position.base.PositionEncoding"))


ROTARY = [x for x in ENCODINGS if issubclass(class_of(x), Rotary) and not issubclass(class_of(x), TrainingFree)]
SCALED = [name for name in ROTARY if issubclass(class_of(name), ScaledRotary)]


def reference(kind, head_dim, original_len, base, length=None, **parameters):
    """(inv_freq, attention factor) by transformers."""
    parameters = {"rope_type": kind, "rope_theta": base, "original_max_position_embeddings": original_len} | parameters
    if kind == "dynamic":  # takes the original length from elsewhere
        parameters.pop("original_max_position_embeddings")
    sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": original_len}
    config = LlamaConfig(**sizes, head_dim=head_dim, rope_parameters=parameters)
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)


def assert_same(ours, theirs):
    # theirs are float32: relative to each frequency, since the low ones are 1e-5 and less
    torch.testing.assert_close(ours[0], theirs[0].double(), rtol=1e-6, atol=1e-12)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-6)


def read(name, head_dim, original_len, scale, base, length=None, **options):
    """(Frequencies, attention factor) with which a model trained at `original_len` reads `length` tokens at `scale`."""
    options |= {"base": base} | ({"scale": scale} if name in SCALED else {})
    (pe,) = position.build_encodings(
        pe_options(name, **options), Shape(head_dim, 1, 1, head_dim, original_len, n_layer=1)
    )
    at_last_scale(pe)
    return pe.frequencies(length or original_len), math.sqrt(pe.logit_scale)


@pytest.mark.parametrize(("head_dim", "original_len", "scale", "base"), GRID)
def test_frequencies_equal_transformers(head_dim, original_len, scale, base):
    size = (head_dim, original_len, scale, base)

    def compare(name, kind, length=None, **options):
        theirs = reference(kind, head_dim, original_len, base, length, factor=scale, **options)
        assert_same(read(name, *size, length, **options), theirs)

    assert_same(read("rope", *size), reference("default", head_dim, original_len, base))
    for share in (1.0, 0.5):
        compare("linear", "linear", partial_rotary_factor=share)
        compare("yarn", "yarn", partial_rotary_factor=share)
    compare("yarn", "yarn", beta_fast=16.0, beta_slow=2.0)
    for low, high in ((1.0, 4.0), (2.0, 16.0)):
        compare("llama3", "llama3", low_freq_factor=low, high_freq_factor=high)
    for length in (original_len // 2, original_len + 1, 3 * original_len):
        compare("dynamic_ntk", "dynamic", length)
    for p in (0.75, 0.3):
        theirs = reference("proportional", head_dim, original_len, base, partial_rotary_factor=p)
        assert_same(read("p_rope", *size, proportion=p), theirs)
    slope = float(scale > 1)  # unscaled is RoPE here, so that only lists of ones are comparable
    short, long = ([1 + slope * step * i for i in range(head_dim // 2)] for step in (0.01, 0.5))
    for length in (original_len, original_len + 1):
        compare("longrope", "longrope", length, short_factor=short, long_factor=long)


@pytest.mark.parametrize(("head_dim", "original_len", "scale", "base"), GRID)
def test_frequencies_equal_loops(head_dim, original_len, scale, base):
    """Those that transformers lacks, from their definitions; longrope without factors is ntk beyond that length."""
    ntk, by_parts = [], []
    for i in range(head_dim // 2):
        ntk.append((base * scale ** (head_dim / (head_dim - 2))) ** (-2 * i / head_dim))
        theta = base ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / theta
        turns = original_len / wavelength
        gamma = 0 if turns < 1 else 1 if turns > 32 else (turns - 1) / (32 - 1)
        by_parts.append((1 - gamma) * theta / scale + gamma * theta)
    size = (head_dim, original_len, scale, base)
    for name, options, expected, factor in (
        ("ntk", {}, ntk, 1),
        ("abf", {}, ntk, 1),
        ("ntk_by_parts", {}, by_parts, 1),
        ("yarn", {"ramp": "paper"}, by_parts, 1 + 0.1 * math.log(scale)),
        ("longrope", {"length": original_len + 1}, ntk, math.sqrt(1 + math.log(scale) / math.log(original_len))),
    ):
        found, own_factor = read(name, *size, **options)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
        assert own_factor == pytest.approx(factor)
    if scale > 1:
        rope = read("rope", head_dim, original_len, 1.0, 654_321.0)[0]
        assert torch.equal(read("abf", *size, new_base=654_321.0)[0], rope)


@pytest.mark.parametrize("name", SCALED)
def test_training_is_rope_bit_for_bit(name):
    """Unless train_len is beyond the original length, or train_scale says otherwise."""
    pe, rope, pos = build_pe(name, train_len=32, scale=8.0), build_pe("rope"), torch.arange(100)
    for ours, theirs in zip(pe.tables(pos, 100), rope.tables(pos, 100), strict=True):
        assert torch.equal(ours, theirs)
    assert pe.scales == (pe.unscaled, 8)
    assert build_pe(name, train_len=32, original_len=16, scale=8.0).scales == (8,)
    assert build_pe(name, train_len=32, scale=8.0, train_scale=2.0).scales == (2, 8)
    net = build_gpt(name, train_len=32)
    assert [net.scale_for(length) for length in (32, 33)] == list(net.scales)


@pytest.mark.parametrize("name", SCALED)
def test_an_extension_of_an_extension_counts_from_the_first_length(name):
    once = at_last_scale(build_pe(name, scale=16.0, train_len=256))
    twice = build_pe(name, scale=16.0, original_len=256, train_len=4096)
    assert torch.equal(once.frequencies(4096), twice.frequencies(4096))
    assert once.logit_scale == twice.logit_scale


def test_auto_keeps_the_frequencies_that_make_a_full_turn():
    for train_len in (8, 64, 300, 100_000):
        pe = build_pe("p_rope", train_len=train_len, proportion="auto")
        theta = [10_000.0 ** (-i / 8) for i in range(8)]
        expected = torch.tensor([f if f * train_len >= 2 * math.pi else 0.0 for f in theta], dtype=torch.float64)
        torch.testing.assert_close(pe.frequencies(train_len), expected, rtol=1e-12, atol=0)
        longer = build_pe("p_rope", train_len=10 * train_len, proportion="auto", original_len=train_len)
        assert torch.equal(longer.frequencies(train_len), pe.frequencies(train_len))


def test_auto_can_be_configured():
    """A configuration is checked with a network on "meta", whose tensors have no values."""
    config = resolve(train_values("pe=p_rope", "pe.proportion=auto", "train_len=64"))
    net = GPT(config.model, config.pe, vocab_size=1, train_len=128)  # going on at another length changes no frequency
    theta = [10_000.0 ** (-2 * i / config.model.head_width) for i in range(config.model.head_width // 2)]
    assert net.encodings[0].kept_pairs == sum(f * 64 >= 2 * math.pi for f in theta)


@pytest.mark.parametrize("name", ["rope", "yarn", "ntk_by_parts"])
def test_resonance_gives_every_pair_a_period_of_whole_tokens(name):
    pe, pos = at_last_scale(build_pe(name, resonance=True, train_len=256)), torch.arange(5_000)
    tables = torch.complex(*pe.tables(pos, 5_000))
    for pair, theta in enumerate(pe.frequencies(5_000)):
        period = round(2 * math.pi / theta.item())
        angle = 2 * math.pi * (pos % period).double() / period
        exact = torch.polar(torch.ones_like(angle), angle)
        assert (tables[:, pair] - exact).abs().max() < 1e-6
    assert pe.family != build_pe(name).family


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_interleaved_layout_is_the_half_layout_of_permuted_channels(name, share):
    half = build_pe(name, partial_rotary_factor=share)
    interleaved = build_pe(name, partial_rotary_factor=share, layout="interleaved")
    q, k = torch.randn(2, 2, 4, 40, 16).unbind(0)
    ctx, n = make_context(half, torch.arange(40), 40, 40), half.rotary_dim
    permutation = [c for i in range(n // 2) for c in (i, i + n // 2)] + list(range(n, 16))
    by_half = half.rotate(q, k, ctx)
    for ours, theirs in zip(interleaved.rotate(q[..., permutation], k[..., permutation], ctx), by_half, strict=True):
        assert torch.equal(ours, theirs[..., permutation])


def test_xpos_scores_equal_loops():
    d, t, gamma, scale_base = 8, 12, 0.3, 5.0
    pe = build_pe("xpos", head_dim=d, gamma=gamma, scale_base=scale_base)
    q, k = torch.randn(2, 1, 1, t, d).unbind(0)
    rotated_q, rotated_k = pe.rotate(q, k, make_context(pe, torch.arange(t), t, t))
    scores = (rotated_q @ rotated_k.mT)[0, 0]
    for i, j in itertools.product(range(t), range(t)):
        expected = 0.0
        for pair in range(d // 2):
            zeta = (2 * pair + gamma * d) / ((1 + gamma) * d)
            query, key = (complex(x[pair], x[pair + d // 2]) for x in (q[0, 0, i], k[0, 0, j]))
            angle = (i - j) * 10_000.0 ** (-2 * pair / d)
            turned = query * complex(math.cos(angle), math.sin(angle)) * key.conjugate()
            expected += turned.real * zeta ** ((i - j) / scale_base)
        assert scores[i, j].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_xpos_is_finite_up_to_its_limit_and_an_error_beyond():
    pe = build_pe("xpos", train_len=256)
    last = torch.tensor([0, pe.max_len - 1])
    for table in make_context(pe, last, 1, pe.max_len).tables:
        assert all(part.isfinite().all() and (part != 0).any() for part in table)
    with pytest.raises(ValueError, match=r"pe\.scale_base"):
        make_context(pe, last + 1, 1, pe.max_len + 1)
    with pytest.raises(ValueError, match="100000 tokens"):
        build_pe("xpos", train_len=100_000)


@pytest.mark.parametrize("name", [name for name in ROTARY if build_pe(name).max_len is None])
def test_precision_at_position_65535(name):
    """A unit vector that is rotated must come out as the exact cosine and sine of its angle, rounded to its type."""
    pe = at_last_scale(build_pe(name, head_dim=64, dim=256, train_len=4096, partial_rotary_factor=1.0))
    length = 65_536
    angle = 65_535.0 * pe.frequencies(length)
    exact = torch.cat((angle.cos(), angle.sin()))
    x = torch.zeros(1, 1, 1, 64)
    x[..., :32] = 1
    for dtype, autocast, limit in (
        (torch.float32, False, 1e-6), (torch.bfloat16, True, 1e-2), (torch.bfloat16, False, 1e-2)
    ):  # fmt: skip
        pe, x = pe.to(torch.float32 if autocast else dtype), x.to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            ctx = make_context(pe, torch.tensor([65_535]), 1, length)
            out = pe.rotate(x, x, ctx)[0].flatten().double()
        assert (out - exact).abs().max() <= limit
        assert (torch.cat(ctx.tables, dim=-1)[0].double() - exact).abs().max() <= 1e-6


@pytest.mark.parametrize("name", ["rope", "p_rope", "fox_rope", "cope_rope"])
def test_values_are_turned_by_the_distance(name):
    """Weights from an attention with one-hot values; then every value turned by its distance, one pair at a time."""
    n, head_dim = 12, 16
    pe = build_pe(name, head_dim=head_dim, dim=64, train_len=n, partial_rotary_factor=0.5, values=True).double()
    plain = build_pe(name, head_dim=head_dim, dim=64, train_len=n, partial_rotary_factor=0.5).double()
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, n, head_dim, dtype=torch.float64, generator=generator)
    state = pe.state(torch.randn(1, n, 64, dtype=torch.float64, generator=generator))
    ctx = make_context(pe, torch.arange(n), n, n)
    one_hot = torch.eye(n, head_dim, dtype=torch.float64).expand_as(v)  # the weight of key j in channel j
    weights = attend(plain, q, k, one_hot, state, ctx)[..., :n]
    pairs = pe.rotary_dim // 2
    turn = pe.frequencies(n)
    expected = torch.zeros_like(v)
    for i, j in itertools.product(range(n), range(n)):
        turned = v[0, :, j].clone()
        for pair in range(pairs):
            angle = (j - i) * float(turn[pair])
            a, b = v[0, :, j, pair], v[0, :, j, pair + pairs]
            turned[:, pair] = a * math.cos(angle) - b * math.sin(angle)
            turned[:, pair + pairs] = b * math.cos(angle) + a * math.sin(angle)
        expected[0, :, i] += weights[0, :, i, j, None] * turned
    torch.testing.assert_close(attend(pe, q, k, v, state, ctx), expected, rtol=1e-5, atol=1e-5)  # tables are fp32


def test_turned_values_in_a_cache():
    net = build_gpt("rope", pe={"values": True, "window": 8})
    idx = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(0))
    cache = net.new_cache()
    pieces = [net(idx[:, start : start + 5], cache) for start in range(0, 24, 5)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), net(idx), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("xpos", {}, "xPos has another factor"),
        ("rerope", {}, "a value has one angle"),
        ("cope_rope", {"gates": "values"}, "absolute positions"),
    ],
)
def test_values_that_cannot_be_turned(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_pe(name, values=True, **options)


@pytest.mark.parametrize(("dim", "length"), [(32, 128), (64, 512), (16, 100), (2, 64), (16, 4)])
def test_the_slowest_pair_turns_once(dim, length):
    """At base auto; the bases at 128 and 512 tokens are those that the literature names."""
    pe = build_pe("rope", head_dim=dim, train_len=length, base="auto")
    known = {(32, 128): 24.9, (64, 512): 93.9, (2, 64): 10_000.0, (16, 4): 10_000.0}
    assert pe.base == pytest.approx(known.get((dim, length), pe.base), rel=1e-2)
    if dim > 2 and length > 2 * math.pi:
        slowest = float(pe.frequencies(length)[-1])
        assert slowest * length == pytest.approx(2 * math.pi)


def test_what_is_chosen_by_length_is_recorded():
    """So that weights that go on at another length keep their base and the size of their window."""
    cfg = resolve(train_values("pe=rope_id", "train_len=128", "pe.window=0.25"))
    assert cfg.pe["base"] == pytest.approx((128 / (2 * math.pi)) ** (16 / 14))  # 16 of 32 channels
    assert cfg.pe["window"] == 0.25
    assert build_pe("rope", train_len=128, window=0.25).window == 32
    assert build_pe("rope", train_len=2, window=0.1).window == 1
    assert build_pe("rope", train_len=2, window=1).window == 1
