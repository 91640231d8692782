"""results.json: read back as written, refused when it is not what it should be."""

import io
import json

import pytest
from rich.console import Console

from evaluation import figures
from evaluation.results import PositionBin, Results, Score, make_row


def results(**changes) -> Results:
    rows = [make_row(Score(100.0 + n, 64, 70, sequences=1), "as trained", "text", n, 256) for n in (128, 256, 512)]
    fields = dict(run="r", encoding="rope", data="code", seed=0, train_len=256, validation=rows[1], lengths=rows)
    return Results(**(fields | changes))


def test_round_trip(tmp_path):
    written = results(by_position=[PositionBin(reading="as trained", start=0, stop=8, loss=2.0, tokens=8)])
    written.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == written


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"version": 1}', json.dumps(results().model_dump() | {"version": 2})]
)
def test_damage_is_a_clear_error(tmp_path, damage):
    (tmp_path / "results.json").write_text(damage)
    with pytest.raises(ValueError, match=r"results\.json is not a results file of version 1"):
        Results.load(tmp_path / "results.json")
    with pytest.raises(ValueError, match="cannot be read"):
        Results.load(tmp_path / "none.json")


def test_table_names_lengths_without_positions():
    table = results(skipped={"scale 1, as trained": [1024]}).table()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert "no position" in text
    assert "1024" in text
    assert f"{(100 + 256) / 0.6931471805599453 / 70:.3f}" in text  # bits per byte at 256


def test_figure_without_bytes_or_positions(tmp_path):
    rows = [make_row(Score(float(n), 64, sequences=1), "as trained", "text", n, 256) for n in (128, 256)]
    assert rows[0].bits_per_byte is None
    figures.draw(results(lengths=rows), tmp_path / "figures" / "f.png")
    assert (tmp_path / "figures" / "f.png").read_bytes().startswith(b"\x89PNG")
