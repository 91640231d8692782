"""Results files: one for each setting, read back as written, refused when damaged."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic import PROVENANCE

from ropewalk.evaluation.results import Evaluation, PartResult, Variant
from ropewalk.evaluation.statistics import estimate

BITS = math.log(2)
TEXTS = 20
LENGTHS = [128, 256, 512, 1024]


def text(length: int, bits: float, noise: float = 0.05, **more) -> PartResult:
    """Twenty texts of 10 bytes in 10 tokens each; the noise of a text is the same at every length."""
    per_text = bits + noise * np.random.default_rng(0).normal(size=TEXTS)
    fields = {
        "nats": (10 * BITS * per_text).tolist(),
        "tokens": [10] * TEXTS,
        "bytes": [10] * TEXTS,
        "errors": [1] * TEXTS,
    }
    return PartResult(length=length, **fields | more)


def evaluation(label="rope", bits=(2.1, 2.0, 2.01, 2.5), pe=None, scale=1.0, zero_shot=False, **more):
    fields = {
        "kind": "lengths",
        "run": "r",
        "run_id": "i",
        "seed": 0,
        "train_len": 256,
        "task": None,
        "step": 10,
        "variant": Variant(label=label, pe={"name": "rope"} | (pe or {}), scale=scale, zero_shot=zero_shot),
        "eval": {"lengths": LENGTHS, "texts": "t"},
        "measured": list(map(text, LENGTHS, bits)),
        "provenance": PROVENANCE,
    }
    return Evaluation(**fields | more)


@pytest.mark.parametrize("name", ["nats", "optimum_nats", "baseline_nats"])
@pytest.mark.parametrize("value", [-(2.0**63), 1e300])
def test_a_sum_that_no_text_can_have_is_refused(name, value):
    """An archive has no place for it, and one such file would end the archive of all other runs."""
    with pytest.raises(ValueError, match="text at 128 has more than any text can have"):
        evaluation(measured=[text(128, 2.0, **{name: [value, *[1.0] * (TEXTS - 1)]})]).numbers()


def test_the_same_settings_replace_their_file_and_others_never_do(tmp_path):
    """Other options of an encoding, other scales, texts and steps: each has a file of its own."""
    others = [
        {"pe": {"beta_fast": 2.0}},
        {"scale": 2.0},
        {"step": 5},
        {"eval": {"lengths": LENGTHS, "texts": "others"}},
        {"kind": "far_copies"},
    ]
    path = evaluation().save(tmp_path)
    for settings in others:
        evaluation(**settings).save(tmp_path)

    assert len(list(tmp_path.iterdir())) == 6

    again = evaluation("rope as trained", bits=(1.0, 1.0, 1.0, 1.0), provenance=PROVENANCE | {"time": "later"})
    assert again.save(tmp_path) == path
    assert Evaluation.load(path) == again


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        ({"version": 2}, "version"),
        ({"more": 1}, "more"),
        ({"measured": [{"task": "text"}]}, "measured.0.length"),
        ({"measured": [text(1, 1.0).model_dump() | {"tokens": [1]}]}, "one entry for each text"),
        ({"measured": [text(1, 1.0).model_dump() | {"span": [5]}]}, r"measured\.0\.span\.1 is missing"),
    ],
)
def test_damage_names_file_field_and_remedy(tmp_path, damage, field):
    """Whoever finds such a file shall know what to do with it."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps(evaluation().model_dump() | damage))
    with pytest.raises(ValueError, match=rf"x\.json is damaged.*{field}.*scripts/evaluate\.py"):
        Evaluation.load(path)


def test_files_are_read_as_written_also_those_of_older_versions(tmp_path):
    """These have no checksum."""
    written = evaluation(skipped=[2048], bits=(math.nan, math.inf, 1 / 3, 2.0))
    path = written.save(tmp_path)
    assert Evaluation.load(path).model_dump_json() == written.model_dump_json()  # NaN is not equal to itself

    path.write_text(written.model_dump_json(exclude={"checksum"}))
    assert Evaluation.load(path).model_dump_json() == written.model_dump_json()


def test_a_link_is_not_read(tmp_path):
    """A run may be somebody else's, and its links reach files outside of it."""
    (tmp_path / "link.json").symlink_to(evaluation().save(tmp_path / "evals"))
    with pytest.raises(ValueError, match="is a link"):
        Evaluation.load(tmp_path / "link.json")


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_flips_is_no_other_result(tmp_path_factory, place, bit):
    """Wherever it lies, but for the line end."""
    path = evaluation().save(tmp_path_factory.mktemp("evals"))
    content = bytearray(path.read_bytes())
    without_line_end = len(content) - 1
    content[int(place * without_line_end)] ^= 1 << bit
    path.write_bytes(content)

    with pytest.raises(ValueError, match=r"\.json (is damaged|cannot be read)"):
        Evaluation.load(path)


@given(name=st.text(max_size=300))
@example(name="../../x")
@example(name=".hidden")
def test_hostile_names_stay_in_the_folder(tmp_path_factory, name):
    """The name of an encoding is part of the file's, and may be anybody's."""
    folder = tmp_path_factory.mktemp("evals")
    path = evaluation(label=name, pe={"name": name}).save(folder)
    assert path.parent == folder
    assert path.name.startswith("lengths-")


@pytest.mark.parametrize(
    ("task", "more", "unit"),
    [
        (None, {}, "bits per byte"),
        (None, {"bytes": [0] * TEXTS}, "bits per token"),
        ("recall", {"task": "recall", "difficulty": "hard"}, "error in percent"),
    ],
)
def test_the_unit_of_a_number(task, more, unit):
    """Its value, and the documents over which it is a mean: see test_table.py."""
    (row,) = evaluation(task=task, measured=[text(256, 2.0, **more)]).numbers()
    assert row["unit"] == unit


def test_ruler_has_answers_found_and_gains():
    """Of each task at each depth, and of the mean over tasks, to which two depths of a task count as one."""
    baseline = [40 * BITS] * TEXTS
    every_second_wrong = {"task": "niah_single", "errors": [0, 1] * 10, "baseline_nats": baseline}
    measured = [
        text(256, 2.0, depth=0.0, **every_second_wrong),
        text(256, 2.0, depth=1.0, **every_second_wrong),
        text(256, 2.0, task="vt", errors=[0] * TEXTS, baseline_nats=baseline),
    ]
    means = {}
    for row in evaluation(kind="ruler", measured=measured).numbers():
        means[row["part"], row["unit"]] = estimate(row["sample"]).value

    assert means["niah_single depth 0.00", "answers found in percent"] == 50
    assert means["mean", "answers found in percent"] == 75
    assert means["niah_single depth 0.00", "bits per answer"] == pytest.approx(20, abs=0.5)
    assert means["mean", "bits per answer"] == pytest.approx(20, abs=0.5)
