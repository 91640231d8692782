"""Aggregation over seeds, against sums done by hand from the files; what is compared with what; damage."""

import csv
import io
import json
import re
import statistics

import pytest
from synthetic import config, write_run

from conf.schema import ConfigError
from evaluation import tables
from evaluation.compare import compare
from evaluation.runs import find


def raw(runs, reading, length, key, slice_name="text"):
    """One number of every results.json, read without our classes."""
    values = []
    for run in runs:
        for found in json.loads((run / "results.json").read_text())["lengths"]:
            if (found["reading"], found["length"], found["slice"]) == (reading, length, slice_name):
                values.append(found[key])
    return values


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, [write_run(folder, "pe=yarn", seed=seed) for seed in (2, 0, 1)]


def test_means_and_half_ranges(three):
    folder, runs = three
    (section,) = compare([folder]).sections
    (table,) = section.tables
    assert [line.reading for line in sorted(table.lines, key=lambda line: line.reading)] == [
        "scale 1, as trained", "scale 4",
    ]  # fmt: skip
    for line in table.lines:
        assert line.seeds == [0, 1, 2]
        for length in (128, 256, 512, 1024, 2048):
            for key in ("bits_per_byte", "loss"):
                values = raw(runs, line.reading, length, key)
                assert len(values) == 3
                spread = line.spread("text", length, key)
                assert spread.mean == pytest.approx(statistics.mean(values), rel=1e-12)
                assert spread.half_range == pytest.approx((sorted(values)[2] - sorted(values)[0]) / 2, rel=1e-9)
    speeds = [json.loads((run / "results.json").read_text())["training"]["tokens_per_s"] for run in runs]
    assert section.groups[0].training("tokens_per_s", [0, 1, 2]).mean == pytest.approx(statistics.mean(speeds))
    assert section.groups[0].training("parameters", [0, 1, 2]).format(0) == "820,480"


def test_a_single_seed_has_no_spread(tmp_path):
    write_run(tmp_path, "pe=rope")
    assert "±" not in tables.markdown(compare([tmp_path])).split("\n\n", 3)[3]


def test_csv_is_read_back(three):
    folder, runs = three
    text = tables.as_csv(compare([folder]))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 2 * 5
    for row in rows:
        values = raw(runs, row["reading"], int(row["length"]), "bits_per_byte")
        assert float(row["bits_per_byte"]) == pytest.approx(statistics.mean(values), rel=1e-12)
        assert float(row["bits_per_byte_half_range"]) == pytest.approx((max(values) - min(values)) / 2, rel=1e-9)
        assert (row["seeds"], row["error"], row["task"]) == ("0 1 2", "", "")
        assert row["runs"].split() == [str(folder / f"yarn-code-s{seed}") for seed in (0, 1, 2)]


def cells(markdown, label):
    """The cells of a line of the first Markdown table; the second has the other quantity."""
    line, *_ = [line for line in markdown.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_markdown_holds_the_same_numbers(three):
    folder, runs = three
    found = cells(tables.markdown(compare([folder])), "yarn, scale 4")
    assert found[1] == "0, 1, 2"
    for length, cell in zip((128, 256, 512, 1024, 2048), found[2:], strict=False):
        values = raw(runs, "scale 4", length, "bits_per_byte")
        assert cell == f"{statistics.mean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def test_a_task_has_a_table_for_each_slice(tmp_path):
    runs = [write_run(tmp_path, "pe=cope", "eval.lengths=[1,2]", seed=seed, task="flip_flop") for seed in (0, 1)]
    text = tables.markdown(compare([tmp_path]))
    captions = re.findall(r"^(Wrong tokens|Sequences).* slice (\w+): 128 sequences", text, re.M)
    assert captions == [(what, name) for name in ("train", "dense", "sparse") for what in ("Wrong tokens", "Sequences")]
    rows = list(csv.DictReader(io.StringIO(tables.as_csv(compare([tmp_path])))))
    for row in rows:
        values = raw(runs, "as trained", int(row["length"]), "error", row["slice"])
        assert float(row["error"]) == pytest.approx(statistics.mean(values), rel=1e-12)
        assert row["bits_per_byte"] == ""
    assert len(rows) == 2 * 3


@pytest.mark.parametrize(
    ("overrides", "options", "title"),
    [
        (["eval.lengths=[1,2,4]"], {}, "code, trained at 256 tokens"),
        (["train_len=512"], {}, "code, trained at 512 tokens"),
        ([], {"identity": "another"}, r"code \([0-9a-f]{6}\), trained at 256 tokens"),
        ([], {"task": "flip_flop"}, "flip_flop, trained at 256 tokens"),
    ],
    ids=["lengths", "train_len", "data", "task"],
)
def test_what_measures_something_else_is_another_table(tmp_path, overrides, options, title):
    write_run(tmp_path, "pe=rope", seed=0)
    write_run(tmp_path, "pe=rope", *overrides, seed=1, **options)
    sections = compare([tmp_path]).sections
    every = [(section, table) for section in sections for table in section.tables]
    assert len(every) == 2
    assert all(len(table.lines) == 1 and len(table.lines[0].seeds) == 1 for _, table in every)
    assert any(re.fullmatch(title, section.title) for section in sections)


def test_other_amounts_are_another_table(tmp_path):
    write_run(tmp_path, "pe=rope", seed=0)
    path = write_run(tmp_path, "pe=rope", seed=1) / "results.json"
    path.write_text(path.read_text().replace('"tokens": 8192', '"tokens": 4096'))
    (section,) = compare([tmp_path]).sections
    assert [table.lines[0].seeds for table in section.tables] in ([[0], [1]], [[1], [0]])


def test_labels_name_what_differs(tmp_path):
    for overrides in (["pe=rope"], ["pe=rope", "pe.base=500"], ["pe=nope"], ["pe=nope", "trainer.max_steps=7"]):
        write_run(tmp_path, *overrides, name=" ".join(overrides))
    (section,) = compare([tmp_path]).sections
    steps = config("pe=rope").trainer.max_steps
    assert [group.label for group in section.groups] == [
        f"nope (max_steps {steps})",
        "nope (max_steps 7)",
        f"rope (base 10000, max_steps {steps})",
        f"rope (base 500, max_steps {steps})",
    ]


def test_what_only_watches_does_not_split_a_group(tmp_path):
    write_run(tmp_path / "a", "pe=rope", seed=0)
    write_run(tmp_path / "b", "pe=rope", "trainer.val_every=7", "logger=csv", seed=1)
    (section,) = compare([tmp_path / "a", tmp_path / "b"]).sections
    assert [list(group.runs) for group in section.groups] == [[0, 1]]


def test_the_same_run_twice_counts_once(tmp_path):
    first = write_run(tmp_path, "pe=rope", name="a")
    second = write_run(tmp_path, "pe=rope", name="b")
    (tmp_path / "link").symlink_to(first)
    (tmp_path / "loop").symlink_to(tmp_path)
    comparison = compare([tmp_path, first, tmp_path])
    assert [run.path for run in comparison.runs] == [first]
    assert comparison.left_out == [(second, f"the same as {first}, the seed too")]


def test_swaps_stand_beside_the_run(tmp_path):
    for seed in (0, 1):
        path = write_run(tmp_path, "pe=rope", seed=seed)
        results = json.loads((path / "results.json").read_text())
        own = [row | {"reading": "rope, as trained"} for row in results["lengths"]]
        other = [row | {"reading": "yarn, scale 8", "bits_per_byte": 1.5 + seed} for row in results["lengths"]]
        swap = results | {"lengths": own + other, "by_position": [], "training": None}
        (path / "swap.json").write_text(json.dumps(swap))
    text = tables.markdown(compare([tmp_path]))
    assert cells(text, "rope")[1] == "0, 1"
    assert cells(text, "rope read as yarn, scale 8")[2] == "2.000 ± 0.500"


def with_bits(run, bits):
    """Let the run have measured these bits per byte at 256 tokens, and twice as many beyond."""
    path = run / "results.json"
    results = json.loads(path.read_text())
    for row in results["lengths"]:
        row["bits_per_byte"] = bits * (2 if row["length"] > 256 else 1)
    path.write_text(json.dumps(results))


def test_the_answer_names_what_the_seeds_do_not_separate(tmp_path):
    """Seeds of alibi reach into those of nope, seeds of rope do not; with a single seed nothing is known."""
    for name, values in {"nope": [1.4, 1.6], "alibi": [1.55, 1.75], "rope": [1.7, 1.8]}.items():
        for seed, bits in enumerate(values):
            with_bits(write_run(tmp_path, f"pe={name}", "eval.lengths=[1,2,4]", seed=seed), bits)
    text = tables.markdown(compare([tmp_path])).replace("**", "")
    rest = "; the seeds do not separate it from alibi ("
    assert f"\nAt 1,024 tokens, 4 times the training length: nope (bits per byte: 3.000 ± 0.200){rest}3.300" in text
    assert f"\nAt 256 tokens, the training length: nope (bits per byte: 1.500 ± 0.100){rest}1.650 ± 0.100).\n" in text
    with_bits(write_run(tmp_path, "pe=cope", "eval.lengths=[1,2,4]"), 1.45)
    text = tables.markdown(compare([tmp_path])).replace("**", "")
    assert "training length: cope (bits per byte: 1.450, one seed); then nope (1.500 ± 0.100), alibi (" in text


def test_lengths_without_positions(tmp_path):
    write_run(tmp_path, "pe=learned", "eval.lengths=[0.5,1,2]")
    write_run(tmp_path, "pe=rope", "eval.lengths=[0.5,1,2]")
    text = tables.markdown(compare([tmp_path]))
    assert cells(text, "learned, scale 1, as trained")[4] == "-"
    assert text.index("| rope |") < text.index("| learned, scale 1")  # whatever its loss at shorter lengths


def test_a_diverged_run_ranks_last(tmp_path):
    path = write_run(tmp_path, "pe=rope") / "results.json"
    write_run(tmp_path, "pe=nope")
    damaged = json.loads(path.read_text())
    for row in damaged["lengths"]:
        row["bits_per_byte"] = float("nan")
    path.write_text(json.dumps(damaged))
    text = tables.markdown(compare([tmp_path]))
    assert cells(text, "rope")[2] == "nan"
    assert text.index("| nope |") < text.index("| rope |")


def test_broken_runs_are_listed(tmp_path):
    good = write_run(tmp_path, "pe=rope", name="good")
    write_run(tmp_path, "pe=rope", name="half", seed=1, finished=False)
    damage = {"config.yaml": "{", "data.json": "", "swap.json": "[]", "results.json": '{"version": 1}'}
    for seed, (file, text) in enumerate(damage.items(), 10):
        (write_run(tmp_path, "pe=rope", name=f"bad {file}", seed=seed) / file).write_text(text)
    (write_run(tmp_path, "pe=rope", name="no config") / "config.yaml").unlink()
    (write_run(tmp_path, "pe=rope", name="bad metrics", seed=3) / "metrics.jsonl").write_text("3\n{\n")
    (write_run(tmp_path, "pe=rope", name="bad environment", seed=4) / "environment.json").write_text("[]")
    (tmp_path / ".sweep").mkdir()
    (tmp_path / ".sweep" / "never began.error").write_text("no such file\nmore\n")
    (tmp_path / ".sweep" / "half.error").write_text("out of memory\n")
    comparison = compare([tmp_path])
    reasons = {path.name: reason for path, reason in comparison.left_out}
    assert reasons.pop("half") == "not finished: step 10 of 600; failed: out of memory"
    assert reasons.pop("never began") == "failed: no such file"
    assert "config.yaml cannot be read" in reasons.pop("no config")
    assert "config.yaml cannot be read" in reasons.pop("bad config.yaml")
    assert reasons.pop("bad results.json").endswith(
        "results.json is not a results file of version 1: run Field required"
    )
    assert "swap.json is not a results file" in reasons.pop("bad swap.json")
    assert "data.json cannot be read" in reasons.pop("bad data.json")
    assert not reasons
    (table,) = comparison.sections[0].tables
    assert good.name in [run.name for run in comparison.runs]
    assert table.lines[0].seeds == [0, 3, 4, 12]
    assert "out of memory" in tables.markdown(comparison)


def test_names_cannot_break_markdown(tmp_path):
    path = write_run(tmp_path, "pe=rope", finished=False, name="a|b`<script>alert(1)<!--script>")
    text = tables.markdown(compare([tmp_path]))
    assert path.name not in text
    assert "<" not in text


def test_no_such_folder(tmp_path):
    with pytest.raises(ConfigError, match="nothing is not a directory"):
        list(find([tmp_path / "nothing"]))
