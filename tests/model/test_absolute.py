"""Sinusoidal and learned encodings, plain and interpolated, against their definitions."""

import math

import pytest
import torch
from conftest import at_last_scale, build_gpt, build_pe, normal, read_at

from model.cache import Cache


@pytest.mark.parametrize(("scale", "base"), [(1.0, 10_000.0), (4.0, 10_000.0), (2.5, 500.0)])
def test_sinusoids_equal_their_definition(scale, base):
    pe = at_last_scale(build_pe("sinusoidal", dim=12, base=base, scale=scale))
    positions = [0, 1, 7, 31, 65_535]
    (x,) = normal((1, 5, 12))
    embedded = pe.embed(x, torch.tensor(positions))
    added = (embedded - math.sqrt(12) * x)[0]  # embeddings are multiplied by the root of the width

    for row, position in zip(added.tolist(), positions, strict=True):
        for i in range(6):
            angle = position / scale * base ** (-2 * i / 12)
            assert row[2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert row[2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("scale", [1.0, 4.0, 1.5])
def test_the_learned_table_is_interpolated_as_defined(scale):
    pe = at_last_scale(build_pe("learned", dim=6, train_len=8, scale=scale))
    length = int(8 * scale)

    assert pe.max_len == length
    (x,) = normal((2, length, 6))
    added = pe.embed(x, torch.arange(length)) - x
    for position in range(length):
        place = position / scale
        below = int(place)
        expected = (below + 1 - place) * pe.table[below] + (place - below) * pe.table[min(below + 1, 7)]
        torch.testing.assert_close(added[:, position], expected.expand(2, -1), rtol=0, atol=1e-6)


def test_a_text_beyond_the_table_is_an_error_that_names_the_remedy():
    net = build_gpt("learned", train_len=16)
    scaled = read_at(net, 4.0)
    text = torch.zeros(1, 65, dtype=torch.long)
    cache = Cache()
    net(text[:, :16], cache=cache)
    net(text[:, :64], encodings=scaled)

    for beyond, options, message in (
        (text[:, :17], {}, r"17 tokens.*16 positions.*pe\.scale=2"),
        (text[:, :1], {"cache": cache}, r"17 tokens.*16 positions.*pe\.scale=2"),
        (text, {"encodings": scaled}, r"65 tokens.*pe\.scale=5"),
    ):
        with pytest.raises(ValueError, match=message):
            net(beyond, **options)


def test_training_beyond_the_table_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"pe\.scale=8"):
        build_pe("learned", train_len=128, original_len=16, scale=4.0)
    assert build_pe("learned", train_len=64, original_len=16, scale=4.0).table.shape == (16, 64)
