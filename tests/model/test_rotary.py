"""The rotary family against the formulas of ropecheck, and against definitions written out as loops in float64."""

import math
from pkgutil import resolve_name

import pytest
import torch
from conftest import ENCODINGS, at_last_scale, attend, build_pe, context, normal, pe_options
from definitions import D, turned
from torch.testing import assert_close

from lab.ropecheck import rope as ropecheck
from model.position.layer import make_context
from model.position.network import for_length
from model.position.rotary import Rotary
from model.position.scaled_rotary import ScaledRotary
from model.position.windowed import TrainingFree

GRID = [  # channels of a head, trained length, scale, base
    (8, 64, 1.0, 10_000.0),
    (8, 8192, 1.5, 500_000.0),
    (128, 64, 32.0, 10_000.0),
    (128, 8192, 1.5, 10_000.0),
    (128, 8192, 32.0, 500_000.0),
]
over_a_grid = pytest.mark.parametrize(("head_dim", "original_len", "scale", "base"), GRID)


def subclasses(of):
    """Names of the encodings that are a kind of it."""
    alone = [name for name in ENCODINGS if "pattern" not in pe_options(name)]
    return [name for name in alone if issubclass(resolve_name(pe_options(name)["_target_"]), of)]


SCALED = subclasses(ScaledRotary)
ROTARY = [name for name in subclasses(Rotary) if name not in subclasses(TrainingFree)]


def read(name, head_dim, original_len, scale, base, length=None, **options):
    """(Frequencies, attention factor) with which a model trained at `original_len` reads `length` tokens at `scale`."""
    options["base"] = base
    if name in SCALED:
        options["scale"] = scale
    pe = at_last_scale(
        build_pe(
            name,
            dim=head_dim,
            n_head=1,
            head_dim=head_dim,
            train_len=original_len,
            **options,
        )
    )
    return pe.frequencies(length or original_len), math.sqrt(pe.logit_scale)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
WIDER = {"low_freq_factor": 2.0, "high_freq_factor": 16.0}
# Encoding and options, the settings of transformers for them, and the length that is read, in trained lengths.
THEIRS = [
    ("rope", {}, {"rope_type": "default"}, 1),
    ("rope", {"partial_rotary_factor": 0.5}, {"rope_type": "default", "partial_rotary_factor": 0.5}, 1),
    ("linear", {}, {"rope_type": "linear"}, 1),
    ("linear", {"partial_rotary_factor": 0.5}, {"rope_type": "linear", "partial_rotary_factor": 0.5}, 1),
    ("yarn", {}, {"rope_type": "yarn"}, 1),
    ("yarn", {"partial_rotary_factor": 0.5}, {"rope_type": "yarn", "partial_rotary_factor": 0.5}, 1),
    ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0}, {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0}, 1),
    ("yarn", {"ramp": "unrounded"}, {"rope_type": "yarn", "truncate": False}, 1),
    ("llama3", LLAMA3, {"rope_type": "llama3"} | LLAMA3, 1),
    ("llama3", WIDER, {"rope_type": "llama3"} | WIDER, 1),
    ("dynamic_ntk", {}, {"rope_type": "dynamic"}, 0.5),
    ("dynamic_ntk", {}, {"rope_type": "dynamic"}, 1 + 2**-6),
    ("dynamic_ntk", {}, {"rope_type": "dynamic"}, 3),
    ("p_rope", {"proportion": 0.75}, {"rope_type": "proportional", "partial_rotary_factor": 0.75, "factor": 1.0}, 1),
    ("p_rope", {"proportion": 0.3}, {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 1.0}, 1),
    ("longrope", {}, {"rope_type": "longrope"}, 1),
    ("longrope", {}, {"rope_type": "longrope"}, 1 + 2**-6),
]


@over_a_grid
@pytest.mark.parametrize(("name", "options", "settings", "lengths"), THEIRS)
def test_frequencies_equal_ropecheck(name, options, settings, lengths, head_dim, original_len, scale, base):
    """Its formulas in numpy, which its own tests compare with transformers."""
    if name == "longrope":
        growth = 0.0 if scale == 1 else 1.0  # unscaled is RoPE here, so that only lists of ones are comparable
        pairs = range(head_dim // 2)
        options = {
            "short_factor": [1 + 0.01 * growth * pair for pair in pairs],
            "long_factor": [1 + 0.5 * growth * pair for pair in pairs],
        }
        settings = settings | options
    length = int(lengths * original_len)
    sizes = {"head_dim": head_dim, "max_position_embeddings": original_len}
    given = {"factor": scale, "rope_theta": base, "original_max_position_embeddings": original_len} | settings
    expected = ropecheck.settings(sizes | {"rope_parameters": given}, length=length)

    frequencies, factor = read(
        name,
        head_dim,
        original_len,
        scale,
        base,
        length,
        **options,
    )

    assert_close(frequencies, torch.from_numpy(ropecheck.inv_freq(expected)), rtol=1e-12, atol=0)
    assert factor == pytest.approx(expected["attention_factor"], rel=1e-12)


@over_a_grid
def test_frequencies_that_transformers_lacks_are_those_of_the_papers(head_dim, original_len, scale, base):
    """longrope without factors is ntk beyond that length."""
    exponent = -torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    theta = base**exponent
    growth = scale ** (head_dim / (head_dim - 2))
    ntk = (base * growth) ** exponent
    abf = 654_321.0**exponent if scale > 1 else theta
    # YaRN, section 3.2: what turns 32 times or more is kept, what turns once or less is divided by the scale.
    turns = original_len * theta / (2 * math.pi)
    kept = ((turns - 1) / (32 - 1)).clamp(0, 1)
    by_parts = (1 - kept) * theta / scale + kept * theta
    # The factors of arXiv 2309.00071 (YaRN) and arXiv 2402.13753 (LongRoPE).
    yarn_factor = 1 + 0.1 * math.log(scale)
    doublings = math.log(scale) / math.log(original_len)
    longrope_factor = math.sqrt(1 + doublings)

    for name, options, expected, expected_factor in (
        ("ntk", {}, ntk, 1),
        ("abf", {}, ntk, 1),
        ("abf", {"new_base": 654_321.0}, abf, 1),
        ("ntk_by_parts", {}, by_parts, 1),
        ("yarn", {"ramp": "paper"}, by_parts, yarn_factor),
        ("longrope", {"length": original_len + 1}, ntk, longrope_factor),
    ):
        frequencies, factor = read(
            name,
            head_dim,
            original_len,
            scale,
            base,
            **options,
        )
        assert_close(frequencies, expected, rtol=1e-12, atol=0)
        assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize("name", SCALED)
def test_every_scaling_trains_as_rope_bit_for_bit(name):
    """Unless train_len is beyond the original length, or train_scale says otherwise."""
    pe = build_pe(name, train_len=32, scale=8.0)
    rope = build_pe("rope")
    positions = torch.arange(100)

    assert_close(
        pe.tables(positions, 100),
        rope.tables(positions, 100),
        rtol=0,
        atol=0,
    )

    assert pe.scales == (pe.unscaled, 8)
    assert build_pe(name, train_len=32, original_len=16, scale=8.0).scales == (8,)
    assert build_pe(name, train_len=32, scale=8.0, train_scale=2.0).scales == (2, 8)

    for length, scale in ((32, pe.unscaled), (33, 8.0)):
        (reads,) = for_length([pe], length)
        assert reads.active_scale == scale


@pytest.mark.parametrize("name", SCALED)
def test_an_extension_of_an_extension_counts_from_the_first_length(name):
    once = at_last_scale(build_pe(name, scale=16.0, train_len=256))
    twice = build_pe(name, scale=16.0, original_len=256, train_len=4096)

    assert torch.equal(once.frequencies(4096), twice.frequencies(4096))
    assert once.logit_scale == twice.logit_scale


def test_clipped_rope_fades_out_the_frequencies_that_p_rope_drops():
    """arXiv 2602.05258: of n dropped pairs, the one of index m keeps (1 + cos(pi m / (n - 1))) / 2 of its frequency."""
    n = 5
    kept_shares = torch.tensor([1.0, 1.0, 1.0, *[(1 + math.cos(math.pi * m / (n - 1))) / 2 for m in range(n)]])
    theta = 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    pe = build_pe("clipped_rope", proportion=3 / 8, factor=2.0)

    assert_close(pe.frequencies(64), theta * kept_shares / 2, rtol=1e-6, atol=0)


def test_p_rope_at_auto_keeps_what_turns_fully_in_training():
    """Also where a longer training extends it."""
    theta = 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    for length in (8, 64, 300, 100_000):
        pe = build_pe("p_rope", train_len=length, proportion="auto")
        longer = build_pe("p_rope", train_len=10 * length, proportion="auto", original_len=length)
        makes_a_full_turn = theta * length >= 2 * math.pi

        assert pe.options["original_len"] == length  # weights that go on at another length keep it
        assert_close(
            pe.frequencies(length),
            theta * makes_a_full_turn,
            rtol=1e-12,
            atol=0,
        )
        assert torch.equal(
            longer.frequencies(length),
            pe.frequencies(length),
        )


@pytest.mark.parametrize("name", ["rope", "yarn", "ntk_by_parts"])
def test_resonance_gives_every_pair_a_period_of_whole_tokens(name):
    pe = at_last_scale(build_pe(name, resonance=True, train_len=256))
    positions = torch.arange(5_000)
    cosines, sines = pe.tables(positions, 5_000)

    periods = (2 * math.pi / pe.frequencies(5_000)).round()
    turns = positions[:, None] % periods / periods
    angle = 2 * math.pi * turns

    assert_close(cosines.double(), angle.cos(), rtol=0, atol=1e-6)
    assert_close(sines.double(), angle.sin(), rtol=0, atol=1e-6)
    assert pe.family != build_pe(name).family


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_interleaved_layout_is_the_half_layout_of_permuted_channels(name, share):
    half = build_pe(name, partial_rotary_factor=share)
    interleaved = build_pe(name, partial_rotary_factor=share, layout="interleaved")
    q, k = normal((2, 4, 40, D), (2, 4, 40, D))
    ctx = context(half, 40)
    # Channels i and i + n / 2 of the first n become neighbours; the others are not rotated.
    rotated_channels = torch.arange(half.rotary_dim).view(2, -1).T.flatten()
    permutation = torch.cat((rotated_channels, torch.arange(half.rotary_dim, D)))

    by_half = half.rotate(q, k, ctx)
    by_interleaved = interleaved.rotate(
        q[..., permutation],
        k[..., permutation],
        ctx,
    )

    assert_close(
        by_interleaved,
        [x[..., permutation] for x in by_half],
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [name for name in ROTARY if build_pe(name).max_len is None],
)
def test_angles_are_exact_at_position_65535(name, weights, activations):
    """A unit vector comes out as the cosine and sine of its angle, with a rounding to fp32 and one to its own type."""
    pe = build_pe(name, head_dim=64, train_len=4096, partial_rotary_factor=1.0).to(weights)
    pe = at_last_scale(pe)
    length = 65_536
    last = torch.tensor([length - 1])
    x = torch.zeros(1, 1, 1, 64, dtype=activations)
    x[..., :32] = 1

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=activations != weights):
        ctx = make_context(pe, last, 1, length)
        rotated, _ = pe.rotate(x, x, ctx)

    angle = last * pe.frequencies(length)
    exact = torch.cat((angle.cos(), angle.sin()))
    table = torch.cat(ctx.tables, dim=-1)[0]
    to_fp32 = 2.0**-24
    to_own = torch.finfo(activations).eps / 2

    assert (table.double() - exact).abs().max() <= to_fp32
    assert (rotated.flatten().double() - exact).abs().max() <= to_fp32 + to_own


@pytest.mark.parametrize("name", ["rope", "p_rope", "fox_rope", "cope_rope"])
def test_values_are_turned_by_the_distance(name):
    """Weights from an attention with one-hot values; then every value turned by its distance."""
    n = 12
    options = {"train_len": n, "partial_rotary_factor": 0.5}
    plain = build_pe(name, **options).double()
    pe = build_pe(name, **options, values=True).double()
    q, k, v, x = normal(
        *[(1, 4, n, D)] * 3,
        (1, n, 64),
        dtype=torch.float64,
    )
    one_hot = torch.eye(n, D, dtype=torch.float64).expand_as(v)  # the weight of key j in channel j
    weights = attend(plain, q, k, one_hot, x)[..., :n]

    out = attend(pe, q, k, v, x)

    j = torch.arange(n)
    distance = j - j[:, None]  # of key j from query i
    of_keys = v[:, :, None]  # [1, H, 1, keys, channels]
    to_turn, kept = of_keys.split(pe.rotary_dim, dim=-1)
    angle = distance[..., None] * pe.frequencies(n)
    of_pairs = turned(to_turn, angle)  # [1, H, queries, keys, channels]
    values = torch.cat((of_pairs, kept.expand_as(of_pairs)), dim=-1)
    expected = torch.einsum("bhij,bhijd->bhid", weights, values)

    assert_close(out, expected, rtol=1e-5, atol=1e-5)  # tables are fp32


@pytest.mark.parametrize(
    ("head_dim", "length", "base"),
    [
        (32, 128, 24.9),
        (64, 512, 93.9),
        (16, 100, None),
    ],
)
def test_at_base_auto_the_slowest_pair_turns_once_in_the_trained_length(head_dim, length, base):
    """At base auto; the bases at 128 and 512 tokens are those that the literature names."""
    pe = build_pe("rope", head_dim=head_dim, train_len=length, base="auto")
    slowest = float(pe.frequencies(length)[-1])

    assert slowest * length == pytest.approx(2 * math.pi)
    assert pe.options["base"] == pe.base  # weights that go on at another length keep it
    assert base is None or pe.base == pytest.approx(base, rel=1e-2)


@pytest.mark.parametrize(
    ("train_len", "window", "tokens"),
    [
        (128, 0.25, 32),
        (2, 0.1, 1),
        (2, 1, 1),
    ],
)
def test_a_window_below_one_is_a_share_of_the_trained_length(train_len, window, tokens):
    pe = build_pe("rope", train_len=train_len, window=window)

    assert (pe.window, pe.options["window"]) == (tokens, window)
