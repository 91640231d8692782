"""Sinusoidal and learned encodings, plain and interpolated, against their definitions."""

import math

import pytest
import torch
from conftest import at_last_scale, build_gpt, build_pe, normal, read_at, tokens

from model.cache import Cache


@pytest.mark.parametrize(
    ("scale", "base"),
    [
        (1.0, 10_000.0),
        (4.0, 10_000.0),
        (2.5, 500.0),
    ],
)
def test_sinusoids_equal_their_definition(scale, base):
    pe = at_last_scale(build_pe("sinusoidal", dim=12, base=base, scale=scale))
    positions = [0, 1, 7, 31, 65_535]
    (x,) = normal((1, 5, 12))

    embedded = pe.embed(x, torch.tensor(positions))

    added = embedded - math.sqrt(12) * x  # embeddings are multiplied by the root of the width
    # "Attention is all you need", section 3.5: sine and cosine of base^(-2i / dim) times the position, side by side.
    for row, position in zip(added[0].tolist(), positions, strict=True):
        expected = []
        for i in range(6):
            angle = position / scale * base ** (-2 * i / 12)
            expected += [math.sin(angle), math.cos(angle)]
        assert row == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("scale", [1.0, 4.0, 1.5])
def test_the_learned_table_is_interpolated_as_defined(scale):
    pe = at_last_scale(build_pe("learned", dim=6, train_len=8, scale=scale))
    length = int(8 * scale)
    (x,) = normal((2, length, 6))

    added = pe.embed(x, torch.arange(length)) - x

    for position in range(length):
        share, below = math.modf(position / scale)
        above = min(below + 1, 7)
        vectors = pe.table[[int(below), int(above)]]
        expected = torch.tensor([1 - share, share]) @ vectors

        torch.testing.assert_close(
            added[:, position],
            expected.expand(2, 6),
            rtol=0,
            atol=1e-6,
        )


@pytest.mark.parametrize(
    ("scale", "length", "message"),
    [
        (1.0, 16, r"17 tokens.*16 positions.*pe\.scale=2"),
        (4.0, 64, r"65 tokens.*64 positions.*pe\.scale=5"),
    ],
)
def test_a_text_beyond_the_table_is_an_error_that_names_the_remedy(scale, length, message):
    """Of which a cache holds all but one token."""
    net = build_gpt("learned", train_len=16)
    encodings = read_at(net, scale)
    text = tokens(length + 1)
    cache = Cache()
    net(text[:, :-1], encodings=encodings, cache=cache)

    with pytest.raises(ValueError, match=message):
        net(text[:, -1:], encodings=encodings, cache=cache)


def test_positions_are_added_once_whatever_else_is_learned():
    """A factor of 1 for each head changes nothing."""
    plain = build_gpt("sinusoidal")
    tempered = build_gpt("sinusoidal", pe={"temperature": "head"})
    for pe in tempered.distinct_encodings:
        torch.nn.init.ones_(pe.head_factor)
    text = tokens(20)
    torch.testing.assert_close(tempered(text), plain(text))
