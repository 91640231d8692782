"""A bad option of an encoding is an error that names it and its value."""

import pytest
from conftest import build_pe

from model.position.network import family_of


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nope", {"window": 0}, r"pe\.window=0: it should be greater than or equal to 1"),
        ("nope", {"base": 3.0}, r"pe\.base: no such key; available: .*window"),
        ("rope", {"base": 1.0}, r"pe\.base=1\.0: it should be greater than 1"),
        ("rope", {"layout": "halves"}, r"pe\.layout='halves': it should be 'half' or 'interleaved'"),
        ("rope", {"base": "10000"}, r"pe\.base='10000': it should be a valid number"),
        ("rope", {"partial_rotary_factor": 0.2}, "even number of channels"),
        ("yarn", {"scale": 0.5}, r"pe\.scale=0\.5 must be below 2\^31 and at least 1"),
        ("yarn", {"scale": float("nan")}, r"pe\.scale=nan"),
        ("yarn", {"train_scale": 0.0}, r"pe\.train_scale=0 must"),
        ("yarn", {"beta_slow": 64.0}, r"pe\.beta_slow=64 must lie between 0 and pe\.beta_fast=32"),
        ("longrope", {"attention_factor": float("inf")}, r"pe\.attention_factor=inf"),
        ("longrope", {"long_factor": [1.0]}, r"pe\.long_factor has 1 divisors, but a head has 8"),
        (
            "longrope",
            {"short_factor": [0.0] * 8},
            r"pe\.short_factor=\[0\.0.*: it should be greater than 0",
        ),
        ("dynamic_ntk", {"scale": -1.0}, r"pe\.scale=-1 must be below 2\^31 and at least 0"),
        ("ntk", {"partial_rotary_factor": 0.125}, "at least 4 rotated channels"),
        ("llama3", {"high_freq_factor": 1.0}, r"pe\.low_freq_factor=1 must lie"),
        ("rerope", {"near_window": 0}, r"pe\.near_window=0"),
        ("self_extend", {"scale": 0.5}, r"pe\.scale=0\.5"),
        ("dca", {"original_len": 1}, r"pe\.original_len=1"),
        ("rerope", {"values": True}, "each value has one angle"),
        ("cope_rope", {"gates": "values", "values": True}, "absolute positions"),
        ("cope", {"npos_max": 0}, r"pe\.npos_max=0"),
        ("string", {"near_window": 4, "local": 5}, r"pe\.local=5 must be at most pe\.near_window=4"),
        (
            "lampe",
            {"capacity": 1.0},
            r"pe\.capacity=1, pe\.near_window=4 and pe\.tail=1 take 37 positions, more than",
        ),
        ("leaky_rerope", {"near_window": 32}, r"pe\.near_window=32 must be below pe\.original_len=32"),
        (
            "self_extend",
            {"near_window": 30},
            r"pe\.near_window=30 must be below 2/3 of .* unless pe\.group is given",
        ),
        ("learned", {"train_len": 65, "original_len": 16, "scale": 4.0}, r"65 tokens.*64 positions.*pe\.scale=5"),
        ("sinusoidal", {"dim": 7}, r"model\.dim=7 must be even"),
        ("t5", {"num_buckets": 31}, r"pe\.num_buckets=31"),
        ("t5", {"max_distance": 16}, r"pe\.max_distance=16"),
        ("fire", {"init_l": float("inf")}, r"pe\.init_l=inf"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_pe(name, **options)


def family(name, **options):
    return family_of([build_pe(name, **options)])


@pytest.mark.parametrize("name", ["yarn", "p_rope", "rerope", "xpos"])
def test_weights_of_one_family_are_read_by_each_other(name):
    assert family(name) == family("rope")


def test_weights_of_different_families_are_told_apart():
    """Weights mean something else with gates, or with another pairing of the channels."""
    families = [family(name) for name in ("rope", "cope", "fox", "cope_rope", "fox_rope", "nope")]
    families += [family(name, layout="interleaved") for name in ("rope", "cope_rope")]
    families += [family("rope", temperature=temperature) for temperature in ("ssmax", "head")]
    families += [family("fox", constant_gates=True), family("fox_rope", constant_gates=True)]
    families += [family("alibi"), family("alibi", learned=True)]

    assert len(set(families)) == len(families)
