"""The rotary settings of a config.json, against transformers: every rope type, in the new and the old style of keys."""

import json

import pytest
from conftest import edit
from hf_models import SIZES, TOKENS, assert_rotates_by, exported, hf_model, network
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lab.ropecheck.__main__ import main as ropecheck
from ropewalk.hf import read_model

ORIGINAL = "original_max_position_embeddings"
YARN = {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.1, ORIGINAL: TOKENS}
LONG = {"factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0], ORIGINAL: TOKENS}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, ORIGINAL: TOKENS}
ROPES = {
    "default": [{}],
    "linear": [{"factor": 4.0}, {"factor": 1.0}],
    "dynamic": [{"factor": 4.0}, {"factor": 1.0}],
    "yarn": [
        YARN,
        {"factor": None, ORIGINAL: TOKENS // 2},
        {"factor": 1.0, "attention_factor": 1.0},
        YARN | {"truncate": False},
        YARN | {"truncate": None, "finetuned": True},
        YARN | {"attention_factor": 1.5},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.0, "beta_slow": 0},
    ],
    "llama3": [LLAMA3, LLAMA3 | {ORIGINAL: TOKENS // 4}],
    "longrope": [LONG, LONG | {"attention_factor": 1.0}, LONG | {"factor": None, ORIGINAL: TOKENS // 4}],
    "proportional": [{"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.75, "factor": 2.0}],
}
VARIANTS = [(kind, 0, "old") for kind in ROPES]
VARIANTS += [(kind, i, "new") for kind, variants in ROPES.items() for i in range(len(variants))]


def hf_rope(kind: str, variant: int = 0):
    rope = {"rope_type": kind, "rope_theta": 500.0} | ROPES[kind][variant]
    return hf_model("llama", **SIZES | dict(rope_parameters=rope))


def to_old_style(folder) -> None:
    """`rope_theta` and `rope_scaling` with a `type`, as transformers wrote them before version 5."""
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    scaling = None if rope["type"] == "default" else rope
    edit(folder / "config.json", rope_parameters=..., rope_theta=theta, rope_scaling=scaling)


def test_transformers_has_no_other_rope_type():
    """A new one must be read, or refused, before its models are."""
    assert set(ROPES) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize(("kind", "variant", "style"), VARIANTS)
def test_every_rope_type_is_read_and_written(kind, variant, style, tmp_path):
    """Our network does what ropecheck reads from the same settings, and so does transformers."""
    hf_rope(kind, variant).save_pretrained(tmp_path / "in")
    if style == "old":
        to_old_style(tmp_path / "in")
    pretrained = read_model(tmp_path / "in")
    net = network(pretrained)
    assert net.train_len == TOKENS
    assert pretrained.pe.get("original_len", TOKENS) == ROPES[kind][variant].get(ORIGINAL, TOKENS)

    exported(net, pretrained.pe, tmp_path / "out")
    for folder in ("in", "out"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert_rotates_by(config, net.encodings)
        # Of dynamic NTK transformers remembers the longest text.
        assert ropecheck([f"transformers:{tmp_path / folder}"]) == (kind == "dynamic")


@pytest.mark.parametrize("original", [TOKENS // 4, float(TOKENS // 4)])
@pytest.mark.parametrize(
    ("kind", "section"),
    [("longrope", None), ("longrope", "rope_scaling"), ("yarn", None), ("yarn", "rope_scaling"), ("llama3", None)],
)
def test_an_original_length_may_be_a_float_or_beside_the_settings(kind, section, original, tmp_path):
    """Beside them, as in models of Phi 3.5 that are published as Llama. The length within the settings is the judge."""
    model = hf_rope(kind)
    for name in ("usual", "other"):
        model.save_pretrained(tmp_path / name)
        to_old_style(tmp_path / name)
        edit(tmp_path / name / "config.json", "rope_scaling", **{ORIGINAL: TOKENS // 4})
    edit(tmp_path / "other" / "config.json", "rope_scaling", **{ORIGINAL: ...})
    edit(tmp_path / "other" / "config.json", section, **{ORIGINAL: original})

    pe = read_model(tmp_path / "other").pe

    assert pe == read_model(tmp_path / "usual").pe
    assert pe["original_len"] == TOKENS // 4


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("yarn", {"attention_factor": 1.5, "factor": 1.0}, "does not rotate and sharpen as Rotary does"),
        ("yarn", {"beta_fast": 32.0, "beta_slow": 30.0}, "does not rotate and sharpen as Yarn does"),
        ("yarn", {"rope_type": "su"}, r"rope_type='su' is not supported; these are: default, linear"),
        ("yarn", {"factor": 0.5}, r"pe\.scale=0\.5 must be below 2\^31 and at least 1"),
        ("longrope", {"long_factor": ...}, "Missing required keys .*long_factor"),
        ("dynamic", {ORIGINAL: 16}, "does not rotate and sharpen as DynamicNTK does"),
        ("default", {"partial_rotary_factor": 0.5}, "does not rotate and sharpen as Rotary does"),
        ("linear", {"partial_rotary_factor": 0.5}, "does not rotate and sharpen as Linear does"),
    ],
)
def test_settings_without_a_counterpart_are_refused_by_name(kind, changes, message, tmp_path):
    hf_rope(kind).config.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", "rope_parameters", **changes)
    with pytest.raises(ValueError, match=message):
        read_model(tmp_path)
