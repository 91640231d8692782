"""The rotary family against transformers, equinox, and definitions written out as loops in float64."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import ENCODINGS, build_gpt, build_pe, pe_options
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from model import position
from model.position import Shape
from model.position.rotary import Rotary
from model.position.scaled_rotary import ScaledRotary

GRID = list(itertools.product([8, 64, 128], [64, 256, 4096, 8192], [1.0, 1.5, 4.0, 32.0], [10_000.0, 500_000.0]))


def class_of(name):
    return position.resolve(pe_options(name).get("_target_", "model.position.base.PositionEncoding"))


def at_scale(pe, scale=None):
    """`pe` at a scale, by default the last that an evaluation measures."""
    pe.active_scale = pe.scales[-1] if scale is None else scale
    return pe


ROTARY = [name for name in ENCODINGS if issubclass(class_of(name), Rotary)]
SCALED = [name for name in ROTARY if issubclass(class_of(name), ScaledRotary)]


def reference(kind, head_dim, original_len, base, length=None, max_len=None, **parameters):
    """(inv_freq, attention factor) by transformers."""
    parameters = {"rope_type": kind, "rope_theta": base, "original_max_position_embeddings": original_len} | parameters
    if kind == "dynamic":  # takes the original length from elsewhere
        parameters.pop("original_max_position_embeddings")
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=max_len or original_len,
        rope_parameters=parameters,
    )
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
    (pe,) = position.build(pe_options(name, **options), Shape(head_dim, 1, 1, head_dim, original_len, n_layer=1))
    at_scale(pe)
    return pe.frequencies(length or original_len), math.sqrt(pe.logit_scale)


@pytest.mark.parametrize(("head_dim", "original_len", "scale", "base"), GRID)
def test_frequencies_equal_transformers(head_dim, original_len, scale, base):
    size = (head_dim, original_len, scale, base)

    def theirs(kind, **parameters):
        return reference(kind, head_dim, original_len, base, **parameters)

    assert_same(read("rope", *size), theirs("default"))
    assert_same(read("linear", *size), theirs("linear", factor=scale))
    assert_same(read("yarn", *size), theirs("yarn", factor=scale))
    assert_same(
        read("yarn", *size, beta_fast=16.0, beta_slow=2.0), theirs("yarn", factor=scale, beta_fast=16, beta_slow=2)
    )
    for low, high in ((1.0, 4.0), (2.0, 16.0)):
        assert_same(
            read("llama3", *size, low_freq_factor=low, high_freq_factor=high),
            theirs("llama3", factor=scale, low_freq_factor=low, high_freq_factor=high),
        )
    for length in (original_len // 2, original_len + 1, 3 * original_len):
        assert_same(read("dynamic_ntk", *size, length=length), theirs("dynamic", factor=scale, length=length))
    for p in (0.75, 0.3):
        assert_same(read("p_rope", *size, proportion=p), theirs("proportional", partial_rotary_factor=p))
    short = [1 + 0.01 * i for i in range(head_dim // 2)]
    long = [1 + 0.5 * i for i in range(head_dim // 2)]
    for length in (original_len, original_len + 1):
        if scale == 1:  # unscaled is RoPE here, so that only lists of ones are comparable
            short = long = [1.0] * (head_dim // 2)
        ours = read("longrope", *size, length=length, short_factor=short, long_factor=long)
        assert_same(ours, theirs("longrope", factor=scale, length=length, short_factor=short, long_factor=long))


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_partial_rotation_equals_transformers(share):
    for scale, kind in ((1.0, "linear"), (4.0, "linear"), (4.0, "yarn")):
        ours = read(kind, 64, 256, scale, 10_000.0, partial_rotary_factor=share)
        assert_same(ours, reference(kind, 64, 256, 10_000.0, factor=scale, partial_rotary_factor=share))


@pytest.mark.parametrize(("head_dim", "original_len", "scale", "base"), GRID)
def test_frequencies_equal_loops(head_dim, original_len, scale, base):
    """Those that transformers lacks, from their definitions."""
    ntk, by_parts = [], []
    for i in range(head_dim // 2):
        ntk.append((base * scale ** (head_dim / (head_dim - 2))) ** (-2 * i / head_dim))
        theta = base ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / theta
        turns = original_len / wavelength
        gamma = 0 if turns < 1 else 1 if turns > 32 else (turns - 1) / (32 - 1)
        by_parts.append((1 - gamma) * theta / scale + gamma * theta)
    size = (head_dim, original_len, scale, base)
    exact = dict(rtol=1e-12, atol=0)
    torch.testing.assert_close(read("ntk", *size)[0], torch.tensor(ntk, dtype=torch.float64), **exact)
    expected = torch.tensor(by_parts, dtype=torch.float64)
    assert read("ntk_by_parts", *size)[1] == 1
    torch.testing.assert_close(read("ntk_by_parts", *size)[0], expected, **exact)
    paper = read("yarn", *size, ramp="paper")
    torch.testing.assert_close(paper[0], expected, **exact)
    assert paper[1] == pytest.approx(1 + 0.1 * math.log(scale))


def test_yarns_two_ramps_differ_as_published():
    share = {}
    for ramp in ("code", "paper"):
        size = (128, 4096, 1e9, 10_000.0)
        share[ramp] = float(read("yarn", *size, ramp=ramp)[0][28] / read("rope", *size)[0][28])
    assert share == pytest.approx({"code": 0.692, "paper": 0.342}, abs=5e-4)


@pytest.mark.parametrize(("scale", "expected"), [(4, 1.2965), (8, 1.4591), (16, 1.6314)])
def test_yarns_logit_scale(scale, expected):
    pe, pos = build_pe("yarn", head_dim=16, scale=float(scale)), torch.arange(8)
    assert pe.logit_scale == 1
    assert at_scale(pe).logit_scale == pytest.approx(expected, abs=5e-5)
    assert pe.context(pos, 8, 8).scale == pytest.approx(expected / 4, abs=5e-5)  # it is at work in the softmax


def test_longrope_without_factors_is_ntk_with_its_own_logit_scale():
    ours, factor = read("longrope", 64, 256, 8.0, 10_000.0, length=257)
    torch.testing.assert_close(ours, read("ntk", 64, 256, 8.0, 10_000.0)[0], rtol=1e-12, atol=0)
    assert factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(256)))


@pytest.mark.parametrize("name", SCALED)
def test_scale_1_is_rope_bit_for_bit(name):
    pe, rope, pos = build_pe(name, scale=1.0), build_pe("rope"), torch.arange(32)
    pe.active_scale = 1.0
    assert pe.logit_scale == 1
    for ours, theirs in zip(pe.tables(pos, 32), rope.tables(pos, 32), strict=True):
        assert torch.equal(ours, theirs)


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


def test_dynamic_ntk_coincides_with_rope_up_to_its_original_length():
    dynamic, rope, pos = at_scale(build_pe("dynamic_ntk", train_len=32)), build_pe("rope"), torch.arange(32)
    for ours, theirs in zip(dynamic.tables(pos, 32), rope.tables(pos, 32), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(dynamic.tables(pos, 33)[1], rope.tables(pos, 33)[1])


@pytest.mark.parametrize("name", SCALED)
def test_an_extension_of_an_extension_counts_from_the_first_length(name):
    once = at_scale(build_pe(name, scale=16.0, train_len=256))
    twice = build_pe(name, scale=16.0, original_len=256, train_len=4096)
    assert torch.equal(once.frequencies(4096), twice.frequencies(4096))
    assert once.logit_scale == twice.logit_scale


def rotate(pe, x):
    """`x` [B, H, T, D] rotated as queries at positions 0.. are."""
    n = x.size(2)
    return pe.rotate(x, x, pe.context(torch.arange(n), n, n))[0]


def test_half_layout_equals_transformers():
    pe, pos = build_pe("rope", head_dim=16), torch.arange(40)
    q, k = torch.randn(2, 2, 3, 40, 16).unbind(0)
    ctx = pe.context(pos, 40, 40)
    whole = [torch.cat((table, table), dim=-1)[None] for table in ctx.tables]
    for ours, theirs in zip(pe.rotate(q, k, ctx), apply_rotary_pos_emb(q, k, *whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_half_layout_equals_equinox():
    golden = json.loads((Path(__file__).parent / "golden" / "equinox_rotary.json").read_text())
    for case in golden["cases"]:
        x, expected = torch.tensor(case["x"]), torch.tensor(case["rotated"])
        pe = build_pe("rope", head_dim=case["head_dim"], base=case["base"])
        torch.testing.assert_close(rotate(pe, x[None, None])[0, 0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_interleaved_layout_is_the_half_layout_of_permuted_channels(name, share):
    half, interleaved = (
        build_pe(name, layout=layout, partial_rotary_factor=share) for layout in ("half", "interleaved")
    )
    q, k = torch.randn(2, 2, 4, 40, 16).unbind(0)
    ctx, n = half.context(torch.arange(40), 40, 40), half.rotary_dim
    permutation = [c for i in range(n // 2) for c in (i, i + n // 2)] + list(range(n, 16))
    by_half = half.rotate(q, k, ctx)
    for ours, theirs in zip(interleaved.rotate(q[..., permutation], k[..., permutation], ctx), by_half, strict=True):
        assert torch.equal(ours, theirs[..., permutation])


def test_real_arithmetic_equals_complex_arithmetic():
    pe, x = build_pe("rope", layout="interleaved"), torch.randn(2, 4, 40, 16)
    angle = torch.arange(40)[:, None] * 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    turned = torch.view_as_complex(x.unflatten(-1, (8, 2))) * torch.polar(torch.ones(40, 8), angle)
    torch.testing.assert_close(rotate(pe, x), torch.view_as_real(turned).flatten(-2), rtol=0, atol=1e-5)


def test_only_part_of_the_channels_rotates():
    pe, x = build_pe("rope", partial_rotary_factor=0.25), torch.randn(1, 1, 8, 16)
    out = rotate(pe, x)
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert (out[:, :, 1:, :4] != x[:, :, 1:, :4]).all()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_xpos_scores_equal_loops(layout):
    d, t, gamma, scale_base = 8, 12, 0.3, 5.0
    pe = build_pe("xpos", head_dim=d, gamma=gamma, scale_base=scale_base, layout=layout)
    q, k = torch.randn(2, 1, 1, t, d).unbind(0)
    rotated_q, rotated_k = pe.rotate(q, k, pe.context(torch.arange(t), t, t))
    scores = (rotated_q @ rotated_k.mT)[0, 0]
    for i, j in itertools.product(range(t), range(t)):
        expected = 0.0
        for pair in range(d // 2):
            a, b = (pair, pair + d // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
            zeta = (2 * pair + gamma * d) / ((1 + gamma) * d)
            query = complex(q[0, 0, i, a], q[0, 0, i, b])
            key = complex(k[0, 0, j, a], k[0, 0, j, b])
            angle = (i - j) * 10_000.0 ** (-2 * pair / d)
            turned = query * complex(math.cos(angle), math.sin(angle)) * key.conjugate()
            expected += turned.real * zeta ** ((i - j) / scale_base)
        assert scores[i, j].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_xpos_is_finite_up_to_its_limit_and_an_error_beyond():
    pe = build_pe("xpos", train_len=256)
    last = torch.tensor([0, pe.max_len - 1])
    for table in pe.tables(last, pe.max_len):
        assert all(part.isfinite().all() and (part != 0).any() for part in table)
    with pytest.raises(ValueError, match=r"pe\.scale_base"):
        pe.tables(last + 1, pe.max_len + 1)
    with pytest.raises(ValueError, match="100000 tokens"):
        build_pe("xpos", train_len=100_000)


@pytest.mark.parametrize("name", [name for name in ROTARY if build_pe(name).max_len is None])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true"])
def test_precision_at_position_65535(name, precision):
    """A unit vector that is rotated must come out as the exact cosine and sine of its angle."""
    pe = at_scale(build_pe(name, head_dim=64, dim=256, train_len=4096))
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    if precision == "bf16-true":
        pe = pe.to(dtype)
    pos, length = torch.tensor([65_535]), 65_536
    x = torch.zeros(1, 1, 1, 64, dtype=dtype)
    x[..., :32] = 1
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        ctx = pe.context(pos, 1, length)
        out = pe.rotate(x, x, ctx)[0].flatten().double()
    angle = 65_535.0 * pe.frequencies(length)
    exact = torch.cat((angle.cos(), angle.sin()))
    limit = 1e-6 if precision == "fp32" else 1e-2
    assert (out - exact).abs().max() <= limit
    cos_sin = torch.cat(ctx.tables, dim=-1)
    assert cos_sin.dtype == torch.float32
    assert (cos_sin[0].double() - exact).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rope", {"base": 1.0}, r"pe\.base=1 must be greater than 1"),
        ("rope", {"partial_rotary_factor": 0.0}, r"pe\.partial_rotary_factor=0 must be in"),
        ("rope", {"partial_rotary_factor": 0.2}, "even number of channels"),
        ("rope", {"layout": "halves"}, r"pe\.layout='halves'"),
        ("yarn", {"scale": 0.5}, r"pe\.scale=0.5 must be at least 1"),
        ("yarn", {"scale": float("nan")}, r"pe\.scale=nan"),
        ("yarn", {"train_scale": 0.0}, r"pe\.train_scale=0 must"),
        ("yarn", {"original_len": 0}, r"pe\.original_len=0"),
        ("yarn", {"beta_slow": 64.0}, r"pe\.beta_slow=64 must lie between 0 and pe\.beta_fast=32"),
        ("yarn", {"ramp": "log"}, r"pe\.ramp='log'"),
        ("yarn", {"attention_factor": 0.0}, r"pe\.attention_factor=0 must be a positive number"),
        ("longrope", {"attention_factor": float("inf")}, r"pe\.attention_factor=inf"),
        ("p_rope", {"factor": 0.0}, r"pe\.factor=0 must be a positive number"),
        ("dynamic_ntk", {"scale": -1.0}, r"pe\.scale=-1 must be at least 0"),
        ("ntk", {"partial_rotary_factor": 0.125}, "at least 4 rotated channels"),
        ("ntk_by_parts", {"beta": 0.5}, r"pe\.alpha=1 must lie between 0 and pe\.beta=0.5"),
        ("llama3", {"high_freq_factor": 1.0}, r"pe\.low_freq_factor=1 must lie"),
        ("longrope", {"long_factor": [1.0]}, r"pe\.long_factor has 1 divisors, but a head has 8"),
        ("longrope", {"short_factor": [0.0] * 8}, r"pe\.short_factor holds 0"),
        ("p_rope", {"proportion": 1.5}, r"pe\.proportion=1.5"),
        ("xpos", {"gamma": 0.0}, r"pe\.gamma=0 must be a positive"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_pe(name, **options)


def test_start_up_says_what_happens_to_the_frequencies():
    plan, counts = build_pe("yarn", head_dim=64, train_len=256).describe()
    assert plan == "Yarn: trains at scale 1 (unscaled), is evaluated at scale 1 and 4; original length 256 tokens"
    assert "of 32 frequencies 1 kept (a smaller pe.beta_fast keeps more), 12 blended, 19 interpolated" in counts
    assert "longest wavelength 188469 tokens; logit scale 1.2965" in counts
    assert "of 32 frequencies 6 kept, " in build_pe("yarn", head_dim=64, train_len=1024).describe()[1]
    assert build_pe("linear", scale=1.0).describe() == [
        "Linear: trains at scale 1 (unscaled); original length 32 tokens"
    ]


@torch.no_grad()
def test_the_default_compiler_keeps_the_numbers():
    net = build_gpt("yarn", n_layer=1)
    compiled, idx = torch.compile(net, fullgraph=True), torch.arange(40)[None]
    torch.testing.assert_close(compiled(idx), net(idx), rtol=0, atol=1e-5)
