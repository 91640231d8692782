"""Text sources: which tokens are in a sample, a validation window, a segment; and where documents come from."""

import inspect
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import text_files, write_corpus
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import data
from data import IGNORE
from data.base import Data
from data.sources import Files, matching_files, stdlib_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    source = text_files(write_corpus(root / "corpus", documents=80), root / "cache", val_fraction=0.3)
    source.prepare()
    return source


def characters(ids):
    return "".join(map(chr, ids))


def find(window, circle):
    """Where `window` stands in the characters `circle`: the texts are random enough for one place."""
    wanted = characters(window)
    assert circle.count(wanted) == 1
    return circle.find(wanted)


@pytest.mark.parametrize("length", [100, 333])
def test_an_epoch_has_each_token_once(source, length):
    stream = source.prepared.train.stream().tolist()
    circle = characters(stream + stream[: length - 1])
    windows = len(stream) // length
    for epoch in (0, 1):
        x, y = source.train_batch(range(epoch * windows, (epoch + 1) * windows), length, 7)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        seen = []
        for row, target in zip(x.tolist(), y[:, -1].tolist(), strict=True):
            start = find(row, circle)
            assert target == stream[(start + length) % len(stream)]
            seen += [(start + t + 1) % len(stream) for t in range(length)]  # where its targets stand
        assert len(set(seen)) == len(seen) == windows * length


def test_epochs_and_seeds_differ(source):
    windows = source.prepared.train.tokens // 50
    epochs = [source.train_batch(range(e * windows, (e + 1) * windows), 50, 0)[0] for e in range(2)]
    assert not torch.equal(*epochs)
    assert not torch.equal(*(e.sort(0).values for e in epochs))  # cut at other places, not only in another order
    assert not torch.equal(epochs[0], source.train_batch(range(windows), 50, 1)[0])


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=8), st.integers(0, 2**32))
def test_a_sample_depends_on_its_index_alone(source, indices, seed):
    together = source.train_batch(indices, 64, seed)
    for row, index in enumerate(indices):
        alone = source.train_batch([index], 64, seed)
        assert torch.equal(together[0][row], alone[0][0])
        assert torch.equal(together[1][row], alone[1][0])


def test_validation_has_each_target_once(source):
    stream = source.prepared.val.stream().tolist()
    part = source.validation(64, 10**9)
    x, y = part.batch(0, part.n)
    assert (part.name, part.length, part.n) == ("text", 64, (len(stream) - 1) // 64)
    assert y.flatten().tolist() == stream[1 : part.n * 64 + 1]
    assert torch.equal(x[:, 1:], y[:, :-1])
    pieces = [part.batch(start, min(start + 3, part.n))[0] for start in range(0, part.n, 3)]
    assert torch.equal(torch.cat(pieces), x)


def test_a_short_validation_is_spread_over_the_split(source):
    whole = source.validation(64, 10**9)
    part = source.validation(64, 5 * 64 + 10)
    assert part.n == 5
    rows, all_rows = part.batch(0, 5)[1].tolist(), whole.batch(0, whole.n)[1].tolist()
    places = [all_rows.index(row) for row in rows]
    assert places == [i * whole.n // 5 for i in range(5)]
    assert source.validation(64, 1).n == 1


LENGTHS, SCORED = [32, 50, 200], 20


def test_slices_share_their_targets(source):
    parts = source.slices(LENGTHS, scored=SCORED, sequences=12)
    whole = parts[-1].batch(0, 12)
    assert [(p.name, p.length, p.n) for p in parts] == [("text", n, 12) for n in LENGTHS]
    for part in parts:
        x, y = part.batch(0, part.n)
        assert x.shape == y.shape == (12, part.length)
        assert torch.equal(y[:, -SCORED:], whole[1][:, -SCORED:])
        assert torch.equal(x, whole[0][:, -part.length :])
        assert (y[:, :-SCORED] == IGNORE).all()
        assert (y[:, -SCORED:] != IGNORE).all()
        assert torch.equal(x[:, 1 - SCORED :], y[:, -SCORED:-1])
        for i in range(part.n):  # one at a time
            assert torch.equal(torch.stack(part.batch(i, i + 1)), torch.stack((x[i : i + 1], y[i : i + 1])))


def test_segments_do_not_overlap_and_come_from_all_documents(source):
    stream, offsets = source.prepared.val.stream().tolist(), source.prepared.val.offsets().tolist()
    (part,) = source.slices([200], scored=200, sequences=10**6)
    starts = [find(row, characters(stream)) for row in part.batch(0, part.n)[0].tolist()]
    assert all(abs(a - b) >= 200 for a in starts for b in starts if a != b)
    owner = [max(d for d, begin in enumerate(offsets) if begin <= start) for start in starts]
    for start, d in zip(starts, owner, strict=True):
        assert start + 200 < offsets[d + 1] - 1  # the last target too lies before the document's end of text
    room = [(b - a - 2) // 200 for a, b in itertools.pairwise(offsets)]
    assert sorted(owner) == sorted(d for d, n in enumerate(room) for _ in range(n))
    turns = [owner[:i].count(d) for i, d in enumerate(owner)]
    assert turns == sorted(turns)
    assert turns[-1] > 0


def test_documents_too_short_for_the_evaluation(source):
    sizes = np.diff(source.prepared.val.offsets()) - 1
    with pytest.raises(
        ValueError, match=rf"no validation document has 9,001 tokens.*the longest.*{sizes.max():,}; lower"
    ):
        source.slices([10, 9000], scored=5, sequences=4)
    assert source.slices([int(sizes.max()) - 1], scored=5, sequences=4)[0].n == 1
    with pytest.raises(ValueError, match=r"no validation document"):
        source.slices([int(sizes.max())], scored=5, sequences=4)
    with pytest.raises(ValueError, match=r"eval\.scored=11 must be between 1 and the shortest length, 10"):
        source.slices([10, 20], scored=11, sequences=4)


def test_a_corpus_too_short_for_a_window(source):
    train, val = source.prepared.train, source.prepared.val
    assert source.train_batch([0], train.tokens - 1, 0)[0].shape == (1, train.tokens - 1)
    with pytest.raises(ValueError, match=rf"train split has {train.tokens:,} tokens"):
        source.train_batch([0], train.tokens, 0)
    with pytest.raises(ValueError, match=rf"val split has {val.tokens:,} tokens"):
        source.validation(val.tokens, 100)


def test_a_long_file_is_several_documents(tmp_path):
    lines = [f"line {i}\n".encode() for i in range(1000)]
    (tmp_path / "one.txt").write_bytes(b"".join(lines))
    files = Files({"one.txt": tmp_path / "one.txt"}, document_bytes=700)
    pieces = list(files.documents(lambda _: True))
    assert b"".join(pieces) == b"".join(lines)
    assert all(p.endswith(b"\n") and 600 < len(p) < 800 for p in pieces[:-1])
    ids = list(files.ids())
    assert len(ids) == len(set(ids)) == len(pieces)
    assert list(files.documents(lambda d: d == ids[2])) == [pieces[2]]
    source = text_files(tmp_path, tmp_path / "cache", document_bytes=700)
    source.prepare()
    assert source.prepared.train.documents + source.prepared.val.documents == len(pieces)


def test_a_line_longer_than_a_document_loses_nothing(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 2500 + b"\n" + b"y" * 30)
    pieces = list(Files({"a": tmp_path / "a"}, document_bytes=300).documents(lambda _: True))
    assert b"".join(pieces) == b"x" * 2500 + b"\n" + b"y" * 30
    assert max(map(len, pieces)) <= 600


def test_matching_files(tmp_path, monkeypatch):
    root = write_corpus(tmp_path / "corpus")
    names = {p.relative_to(root).as_posix() for p in root.rglob("*.txt")}
    assert set(matching_files([f"{root}/**/*.txt"])) == names
    twice = matching_files([f"{root}/**/*.txt", f"{root}/part0/*.txt"])
    assert sorted(twice.values()) == sorted(matching_files([f"{root}/**/*.txt"]).values())
    monkeypatch.chdir(root)
    assert set(matching_files(["part0/*.txt"])) == {n.removeprefix("part0/") for n in names if n.startswith("part0/")}
    assert set(matching_files(["**/*.txt"])) == names
    assert set(matching_files(["part0/00.txt"])) == {"00.txt"}
    same_name = matching_files(["part*/00.txt", "empty.txt", f"{root}/latin.txt"])
    assert len(same_name) == 3
    with pytest.raises(ValueError, match=r"data\.files=\*\.text matches no file \(seen from .*corpus\)"):
        matching_files(["*.txt", "*.text"])
    with pytest.raises(ValueError, match=r"data\.files='part0/\*\*/\*'"):
        matching_files(["part0"])


def test_an_unreadable_file_is_named(tmp_path):
    files = Files({"gone": write_corpus(tmp_path) / "empty.txt"})
    (tmp_path / "empty.txt").unlink()
    with pytest.raises(ValueError, match=r"empty\.txt cannot be read: No such file"):
        list(files.documents(lambda _: True))


def test_the_standard_library(tmp_path):
    files = stdlib_files()
    assert {"abc.py", "json/decoder.py", "asyncio/tasks.py"} <= set(files)
    assert not [n for n in files if {"test", "tests", "idle_test", "site-packages"} & set(n.split("/"))]
    source = data.build({"_target_": "data.text.StdlibCode", "name": "code", "cache_dir": str(tmp_path)})
    source.prepare()
    train, val = source.prepared.train, source.prepared.val
    assert train.bytes + val.bytes > 5e6
    assert 0.05 < val.bytes / (train.bytes + val.bytes) < 0.2
    assert source.slices([128, 2048], scored=64, sequences=64)[0].n == 64
    assert source.vocab_size == 257
    x, _ = source.train_batch(range(64), 256, 0)
    assert x.max() <= 256
    assert "def " in source.decode(x.flatten().tolist())


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The same rows in every format that `datasets` reads from disk."""
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("rows")
    texts = [f"row {i} " + "word " * (i % 7) for i in range(50)]
    table = datasets.Dataset.from_dict({"text": texts, "number": list(range(50))})
    table.to_parquet(root / "t.parquet")
    (root / "t.json").write_text("".join(json.dumps({"text": t, "number": 0}) + "\n" for t in texts))
    (root / "t.txt").write_text("\n".join(texts))
    table.save_to_disk(root / "arrow")
    return root, texts


def hugging_face(rows, cache, **options):
    options = {"cache_dir": str(cache), "val_fraction": 0.2} | options
    return data.build({"_target_": "data.text.HuggingFace", "name": "hf", **options})


@pytest.mark.parametrize(
    ("path", "files"), [("parquet", "t.parquet"), ("json", "t.json"), ("text", "t.txt"), ("arrow", "arrow/*.arrow")]
)
def test_local_datasets(rows, tmp_path, monkeypatch, path, files):
    root, texts = rows
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    source = hugging_face(rows, tmp_path / "cache", path=path, data_files=str(root / files))
    source.prepare()
    train, val = source.prepared.train, source.prepared.val
    assert train.documents + val.documents == 50
    assert val.documents > 2
    assert train.bytes + val.bytes == sum(map(len, texts))
    again = hugging_face(rows, tmp_path / "cache", path=path, data_files=str(root / files))
    again.prepare()
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 1


def test_bad_datasets(rows, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    parquet = {"path": "parquet", "data_files": str(rows[0] / "t.parquet")}
    for options, message in [
        (parquet | {"text_field": "txt"}, r"data\.text_field=txt is no column of parquet: it has text, number"),
        (parquet | {"text_field": "number"}, r"data\.text_field=number holds int64"),
        (parquet | {"split": "dev"}, r"data\.path=parquet could not be loaded.*data\.split=dev"),
        ({"path": "parquet", "data_files": str(rows[0] / "*.nothing")}, r"data\.path=parquet could not be loaded"),
    ]:
        with pytest.raises(ValueError, match=message):
            hugging_face(rows, tmp_path / "cache", **options).prepare()
    assert not (tmp_path / "cache").exists()


def test_an_unreachable_hub(tmp_path, monkeypatch):
    import datasets

    def refuse(*args, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        ValueError, match=r"data\.path=some/where could not be loaded \(ConnectionError: .*offline, use"
    ):
        hugging_face(None, tmp_path, path="some/where").prepare()


BAD = {
    "TextFiles": [
        ({}, r"data\.files is missing"),
        ({"files": []}, r"data\.files is missing"),
        ({"files": "x", "document_bytes": 0}, r"data\.document_bytes=0"),
    ],
    "HuggingFace": [({}, r"data\.path is missing")],
    "StdlibCode": [
        ({"val_fraction": 0.0}, r"data\.val_fraction=0 must be"),
        ({"val_fraction": 1.0}, r"data\.val_fraction=1 must be"),
        ({"workers": -1}, r"data\.workers=-1"),
    ],
}


@pytest.mark.parametrize(("name", "options", "message"), [(n, *case) for n, cases in BAD.items() for case in cases])
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        data.build({"_target_": f"data.text.{name}", "name": "x", **options})


@pytest.mark.parametrize(
    "target",
    ["os.system", "data.text.np.save", "data.text.TextData.prepare", "data.nothing.X", "data.text.Path", "Data"],
)
def test_only_sources_are_built(target):
    with pytest.raises(ValueError, match="is not a Data class"):
        data.resolve(target)


@pytest.mark.parametrize("name", ["code", "text", "hf"])
def test_every_option_stands_in_its_yaml_with_its_default(name):
    """A configuration file is the documentation of its class: no option missing, none invented, no other default."""
    own = OmegaConf.load(ROOT / "conf" / "data" / f"{name}.yaml")
    if own.pop("defaults", None):
        own = OmegaConf.merge(OmegaConf.load(ROOT / "conf" / "data" / "code.yaml"), own)
    values = OmegaConf.to_container(own)
    cls = data.resolve(values.pop("_target_"))
    assert values.pop("name") == name == cls.label
    options = {
        p.name: p.default
        for c in cls.__mro__
        if issubclass(c, Data) and "__init__" in vars(c)
        for p in inspect.signature(c.__init__).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    assert values == options


def test_imports_stay_light():
    code = (
        "import sys, data.text, data.sampler; "
        "print([m for m in ('datasets', 'wandb', 'lightning', 'matplotlib', 'model') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
