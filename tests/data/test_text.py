"""Where documents come from, which options are refused, and which classes a configuration may name."""

import inspect
import json
import sys

import pytest
from conftest import ROOT
from corpora import documents_of, prepared, write_corpus
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from data import base as data
from data.text import matching_files, read_files, stdlib_files


@given(lines=st.lists(st.integers(0, 200), max_size=12), size=st.integers(1, 90))
def test_pieces_of_any_file(tmp_path_factory, lines, size):
    path = tmp_path_factory.mktemp("pieces") / "a"
    path.write_bytes(b"\n".join(bytes([97 + i]) * n for i, n in enumerate(lines)))
    documents = list(read_files([("a", path)], document_bytes=size).documents())
    assert [name for name, _ in documents] == [f"a#{i}" for i in range(len(documents))]
    pieces = [text for _, text in documents]
    assert b"".join(pieces) == path.read_bytes()
    assert max(map(len, pieces), default=0) <= 2 * size
    if max(lines, default=0) < size:  # a longer line is cut
        assert all(p.endswith(b"\n") for p in pieces[:-1] if p)


def test_documents_of_one_file_are_on_one_side(tmp_path):
    """Unless there is only one file."""
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text("".join(f"{i} {line}\n" for line in range(100)))
    source = prepared(tmp_path, tmp_path / "cache", document_bytes=128)
    train, val = ([text.split()[0] for text in documents_of(source, name)] for name in ("train", "val"))
    assert len(train) + len(val) > 100
    assert set(train) | set(val) == {str(i) for i in range(30)}
    assert not set(train) & set(val)
    single = prepared(None, tmp_path / "cache", files=str(tmp_path / "7.txt"), document_bytes=128)
    assert min(split.documents for split in single.prepared.values()) > 0


@pytest.mark.parametrize("character", ["é", "漢", "👩"])
def test_a_long_line_is_cut_between_characters(tmp_path, character):
    """In UTF-8: other files are cut at any byte, but nothing is lost."""
    path = tmp_path / "a"
    for before in range(4):
        for text, is_utf8 in (("a" * before + character * 200, True), ("a" * before + 200 * "\x9f", False)):
            path.write_bytes(text.encode() if is_utf8 else text.encode("latin-1"))
            pieces = [piece for _, piece in read_files([("a", path)], document_bytes=64).documents()]
            assert b"".join(pieces) == path.read_bytes()
            assert len(pieces) == -(-path.stat().st_size // 64)
            if is_utf8:
                assert "".join(piece.decode() for piece in pieces) == text  # a cut character is an error
            assert max(map(len, pieces)) <= 128


def test_links_that_lead_back_are_followed_once(tmp_path):
    root = write_corpus(tmp_path / "corpus", documents=3)
    elsewhere = write_corpus(tmp_path / "elsewhere", documents=1)
    names = {name for name, _ in matching_files([f"{root}/**/*.txt"])}
    for i, target in enumerate((root, root / "part0", tmp_path, elsewhere)):
        (root / "part1" / f"link{i}").symlink_to(target)
        (root / f"z{i}").symlink_to(target)
    found = dict(matching_files([f"{root}/**/*.txt"]))
    linked = {path.relative_to(elsewhere).as_posix() for path in elsewhere.rglob("*.txt")}
    assert set(found) == names | {f"part1/link3/{name}" for name in linked}
    assert set(found.values()) == {*root.rglob("*.txt"), *elsewhere.rglob("*.txt")}


def test_matching_files(tmp_path, monkeypatch):
    root = write_corpus(tmp_path / "corpus")
    names = {p.relative_to(root).as_posix() for p in root.rglob("*.txt")}
    inner = {n.removeprefix("part0/") for n in names if n.startswith("part0/")}
    monkeypatch.chdir(root)
    for patterns, expected in [
        ([f"{root}/**/*.txt"], names),
        ([f"{root}/**/*.txt", f"{root}/part0/*.txt"], names),
        (["**/*.txt"], names),
        (["part0/*.txt"], inner),
        (["part0/00.txt"], {"00.txt"}),
        (["part*/00.txt", "empty.txt", f"{root}/latin.txt"], {"part0/00.txt", "empty.txt", "latin.txt"}),
    ]:
        found = matching_files(patterns)
        assert {name for name, _ in found} == expected
        assert len({path for _, path in found}) == len(found) == len(expected)
    with pytest.raises(ValueError, match=r"data\.files=\*\.text matches no file \(seen from .*corpus\)"):
        matching_files(["*.txt", "*.text"])
    with pytest.raises(ValueError, match=r"data\.files=part0 matches .*data\.files='FOLDER/\*\*/\*'"):
        matching_files(["part0"])


def test_bad_files_are_named(tmp_path):
    (tmp_path / "gone.txt").write_text("a")
    source = read_files([("gone", tmp_path / "gone.txt")])
    (tmp_path / "gone.txt").unlink()
    with pytest.raises(ValueError, match=r"gone\.txt cannot be read: No such file"):
        list(source.documents())
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"some text {i}", encoding="utf-16")
    with pytest.raises(ValueError, match=r"\.txt has NUL bytes, as UTF-16 .* convert"):
        prepared(tmp_path, tmp_path / "cache")


def test_the_standard_library(tmp_path):
    files = [name for name, _ in stdlib_files()]
    assert {"abc.py", "json/decoder.py", "asyncio/tasks.py"} <= set(files)
    assert not [n for n in files if {"test", "tests", "idle_test", "site-packages", "encodings"} & set(n.split("/"))]
    source = prepared(None, tmp_path, "StdlibCode", val_fraction=0.1)
    train, val = (source.prepared[name].bytes for name in ("train", "val"))
    assert train + val > 5e6
    assert 0.05 < val / (train + val) < 0.2
    assert source.eval_sets([128, 2048], target_tokens=64, sequences=64)[0].n == 64
    assert "def " in source.decode(source.train_batch(range(64), 256, 0)[0].flatten().tolist())


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The same rows in every format that `datasets` reads from disk."""
    import datasets

    root = tmp_path_factory.mktemp("rows")
    texts = [f"row {i} " + "word " * (i % 7) for i in range(50)]
    table = datasets.Dataset.from_dict({"text": texts, "number": list(range(50))})
    table.to_parquet(root / "t.parquet")
    (root / "t.json").write_text("".join(json.dumps({"text": t, "number": 0}) + "\n" for t in texts))
    table.save_to_disk(root / "arrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "hf")
        yield root, texts


def test_local_files_without_rows_are_named(rows, tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).select([]).to_parquet(tmp_path / "none.parquet")
    empty = {"path": "parquet", "data_files": str(tmp_path / "none.parquet")}
    with pytest.raises(ValueError, match=r"data\.path=parquet .*(each file has rows|0 documents)"):
        prepared(None, tmp_path / "cache", "HuggingFace", **empty)
    (tmp_path / "bad.json").write_text('{"text": "a"')
    with pytest.raises(ValueError, match=r"data\.path=json could not be loaded \(ArrowInvalid: JSON parse error"):
        prepared(None, tmp_path / "cache", "HuggingFace", path="json", data_files=str(tmp_path / "bad.json"))


@pytest.mark.parametrize("file", ["t.parquet", "t.json", "arrow/*.arrow"])
def test_local_datasets(rows, tmp_path, file):
    root, texts = rows
    for _ in range(2):  # the second finds what the first has made
        where = {"path": file.rpartition(".")[2], "data_files": str(root / file)}
        source = prepared(None, tmp_path / "cache", "HuggingFace", **where)
    train, val = source.prepared["train"], source.prepared["val"]
    assert train.documents + val.documents == 50
    assert val.documents > 2
    assert train.bytes + val.bytes == sum(map(len, texts))
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 1


def test_bad_options(rows, tmp_path):
    parquet = {"path": "parquet", "data_files": str(rows[0] / "t.parquet")}
    no_text = r"no column of text in parquet: it has text \(string\), number \(int64\)"
    for kind, options, message in (
        ("TextFiles", {"files": []}, r"data\.files is missing"),
        ("TextFiles", {"files": "x", "document_bytes": 0}, r"data\.document_bytes=0"),
        ("StdlibCode", {"val_fraction": 1.0}, r"data\.val_fraction=1 must be"),
        ("HuggingFace", {}, r"data\.path is missing"),
        ("HuggingFace", parquet | {"text_field": "txt"}, rf"data\.text_field=txt is {no_text}"),
        ("HuggingFace", parquet | {"text_field": "number"}, rf"data\.text_field=number is {no_text}"),
        ("HuggingFace", parquet | {"split": "dev"}, r"parquet could not be loaded.*data\.split=dev.*offline, use"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared(None, tmp_path / "cache", kind, **options)
    assert not (tmp_path / "cache").exists()


def test_only_data_classes_of_known_packages_are_built(tmp_path, monkeypatch):
    """Those of a user's own are named by ROPEWALK_PLUGINS."""
    (tmp_path / "own.py").write_text("from pathlib import Path\nfrom data.text import StdlibCode as Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="it is outside of data"):
        data.resolve("own.Mine")
    assert "own" not in sys.modules
    monkeypatch.setenv("ROPEWALK_PLUGINS", "own, other")
    assert data.build_data({"_target_": "own.Mine", "name": "mine", "val_fraction": 0.2}).label == "code"
    for target in (
        "os.system", "data.text.np.save", "data.text.TextData", "data.text.TextData.prepare", "data.nothing.X",
        "data.text.Path", "Data", "database.X", "own_data.Own", "own.Path",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"is not a Data class .*ROPEWALK_PLUGINS"):
            data.resolve(target)


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "data").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_option_stands_in_its_yaml_with_its_default(path):
    """A configuration file documents its class: no option is missing, none invented, none has another default."""
    own = OmegaConf.load(path)
    if own.pop("defaults", None):
        own = OmegaConf.merge(OmegaConf.load(path.with_name("code.yaml")), own)
    values = OmegaConf.to_container(own)
    cls = data.resolve(values.pop("_target_"))
    assert values.pop("name") == path.stem == (cls.task or cls.label)
    parameters = inspect.signature(cls).parameters.values()
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    assert values == {p.name: list(p.default) if isinstance(p.default, tuple) else p.default for p in parameters}
