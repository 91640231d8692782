"""Results files: one for each setting, read back as written, refused when damaged."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic import PROVENANCE

from ropewalk.evaluation.results import Evaluation, Measured, Part, Variant, load_all, main_rows, objective

BITS = math.log(2)
TEXTS = 20
LENGTHS = [128, 256, 512, 1024]


def text(length: int, bits: float, noise: float = 0.05, **more) -> Measured:
    """Twenty texts of 10 bytes in 10 tokens each; the noise of a text is the same at every length."""
    per_text = bits + noise * np.random.default_rng(0).normal(size=TEXTS)
    fields = {
        "nats": (10 * BITS * per_text).tolist(),
        "tokens": [10] * TEXTS,
        "bytes": [10] * TEXTS,
        "errors": [1] * TEXTS,
    }
    return Measured(length=length, **fields | more)


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


def test_the_same_settings_replace_their_file_and_others_never_do(tmp_path):
    """Other options of an encoding, other scales, texts and steps: each has a file of its own."""
    others = [
        {"pe": {"beta_fast": 2.0}},
        {"scale": 2.0},
        {"step": 5},
        {"eval": {"lengths": LENGTHS, "texts": "others"}},
        {"kind": "by_position"},
    ]
    path = evaluation().save(tmp_path)
    assert len({path, *(evaluation(**settings).save(tmp_path) for settings in others)}) == 6

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
    ],
)
def test_damage_names_file_field_and_remedy(tmp_path, damage, field):
    path = tmp_path / "lengths-x.json"
    path.write_text(json.dumps(evaluation().model_dump() | damage))
    with pytest.raises(ValueError, match=rf"lengths-x\.json is damaged.*{field}.*scripts/evaluate\.py"):
        Evaluation.load(path)


def test_files_are_read_as_written_and_links_are_not(tmp_path):
    written = evaluation(skipped=[2048], bits=(math.nan, math.inf, 1 / 3, 2.0))
    path = written.save(tmp_path / "evals")
    (loaded,) = load_all(tmp_path)
    assert loaded.model_dump_json() == written.model_dump_json()  # NaN is not equal to itself

    (tmp_path / "link.json").symlink_to(path)
    with pytest.raises(ValueError, match="is a link"):
        Evaluation.load(tmp_path / "link.json")


def test_files_of_older_versions_have_no_checksum(tmp_path):
    path = evaluation().save(tmp_path)
    values = json.loads(path.read_text())
    del values["checksum"]
    path.write_text(json.dumps(values))
    assert Evaluation.load(path) == evaluation()


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_flips_is_no_other_result(tmp_path_factory, place, bit):
    path = evaluation().save(tmp_path_factory.mktemp("evals"))
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << bit  # the last byte is a line end
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"\.json (is damaged|cannot be read)"):
        Evaluation.load(path)


@given(name=st.text(max_size=300))
@example(name="../../x")
@example(name=".hidden")
def test_hostile_names_stay_in_the_folder(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("evals")
    path = evaluation(label=name, pe={"name": name}).save(folder)
    assert path.parent == folder
    assert path.name.startswith("lengths-")


def row_of(measured: Measured, **more):
    """The only row of an evaluation with one measurement."""
    (row,) = evaluation(measured=[measured], **more).rows()
    return row


def test_a_loss_is_in_bits_per_byte_or_token():
    row = row_of(text(256, 2.0, optimum_nats=[15 * BITS] * TEXTS))
    assert (row.quantity, row.unit, row.length) == ("loss", "bits per byte", 256)
    assert row.sample.values.sum() / 200 == pytest.approx(2.0, abs=0.05)
    assert row.optimum.values.sum() / row.optimum.units.sum() == pytest.approx(1.5)
    assert row_of(text(256, 2.0, bytes=[0] * TEXTS)).unit == "bits per token"


def test_a_task_has_errors():
    two_of_ten_wrong = text(256, 2.0, task="recall", difficulty="hard", errors=[2] * TEXTS)
    row = row_of(two_of_ten_wrong, task="recall")
    assert (row.quantity, row.unit, row.part.name) == ("error", "error in percent", "hard")
    assert set((row.sample.values / 10).flat) == {20.0}


def test_ruler_has_answers_found_and_gains():
    baseline = [40 * BITS] * TEXTS
    every_second_wrong = {"task": "niah_single", "errors": [0, 1] * 10, "baseline_nats": baseline}
    at_start = text(256, 2.0, depth=0.0, **every_second_wrong)
    at_end = text(256, 2.0, depth=1.0, **every_second_wrong)
    all_right = text(256, 2.0, task="vt", errors=[0] * TEXTS, baseline_nats=baseline)
    mean_found, mean_gain, found, gain, *_ = evaluation(kind="ruler", measured=[at_start, at_end, all_right]).rows()

    for row, part, percent in ((found, "niah_single depth 0.00", 50), (mean_found, "mean", 75)):
        assert (row.quantity, row.unit, row.part.name) == ("found", "answers found in percent", part)
        assert row.sample.values.mean() == percent
    for row in (gain, mean_gain):
        assert (row.quantity, row.unit) == ("gain", "bits per answer")
        assert row.sample.values.mean() == pytest.approx(20, abs=0.5)


def test_texts_of_one_document_are_one():
    row = row_of(text(256, 2.0, documents=["a", 7, "b", 7] * 5))
    a, first_7, b, second_7 = row_of(text(256, 2.0)).sample.values.reshape(5, 4).sum(0)
    np.testing.assert_allclose(row.sample.values, [[a, first_7 + second_7, b]])
    assert row.sample.units.tolist() == [50, 100, 50]


def test_the_main_number_is_found_by_settings_part_and_length():
    tested = [evaluation(), evaluation(eval={"lengths": [], "texts": "others"}), evaluation(kind="by_position")]
    rows = main_rows(tested, "lengths", {"texts": "t"})
    assert list(rows) == [(Part(), length) for length in LENGTHS]
    assert rows[Part(), 1024].sample.values.mean() == pytest.approx(25, abs=0.5)
    assert main_rows(tested, "lengths", {"texts": "t", "sequences": 3}) == {}


def test_objective_is_the_longest_length_of_the_final_weights():
    """As the run's own encoding reads them, at its best scale; infinite if it diverged there."""
    evaluations = [
        evaluation(step=5, bits=(1, 1, 1, 1)),
        evaluation(bits=(2, 2, 2, 2.5)),
        evaluation(bits=(2, 2, 2, 2.25), scale=4.0, zero_shot=True),
        evaluation(bits=(1, 1, 1, 1), scale=8.0, pe={"name": "yarn"}, zero_shot=True),
    ]
    assert objective(evaluations) == pytest.approx(2.25, abs=0.05)
    assert objective([evaluation(bits=(2, 2, 2, math.nan))]) == math.inf
