"""Where documents come from, which options are refused, and which classes a configuration may name."""

import inspect
import math
import sys

import datasets
import numpy as np
import pyarrow
import pytest
from conftest import ROOT
from corpora import documents_of, prepared, write_corpus
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pyarrow import parquet

from data import base as data
from data.text import matching_files, read_files, stdlib_files
from ropewalk.plugins import current_options


def pieces_of(path, document_bytes):
    return [piece for _, piece in read_files([("a", path)], document_bytes=document_bytes).documents()]


@given(lines=st.lists(st.integers(0, 200), max_size=12), size=st.integers(1, 90), mark=st.booleans())
@example(lines=[1, 1], size=2, mark=False)  # the last line has no end, and belongs to the first piece
def test_pieces_of_any_file(tmp_path_factory, lines, size, mark):
    """`lines` are the lengths of a file's lines; each is of another letter. A byte order mark is no text."""
    letters = b"abcdefghijkl"
    text = b"\n".join(letters[i : i + 1] * length for i, length in enumerate(lines))
    path = tmp_path_factory.mktemp("pieces") / "a"
    path.write_bytes(b"\xef\xbb\xbf" * mark + text)
    pieces = pieces_of(path, size)
    assert b"".join(pieces) == text
    assert max(map(len, pieces), default=0) <= 2 * size
    if max(lines, default=0) < size:  # a longer line is cut
        full = [piece for piece in pieces if piece]
        assert all(piece.endswith(b"\n") for piece in full[:-1])


@pytest.mark.parametrize("character", ["é", "漢", "👩"])
@pytest.mark.parametrize("before", range(4))
def test_a_long_line_is_cut_between_characters(tmp_path, character, before):
    path = tmp_path / "a"
    text = "a" * before + character * 200
    path.write_text(text)
    pieces = pieces_of(path, document_bytes=64)
    assert "".join(piece.decode() for piece in pieces) == text  # a cut character is an error
    assert len(pieces) == math.ceil(len(text.encode()) / 64)

    # Where bytes are no UTF-8 they are cut anywhere, but nothing is lost.
    path.write_bytes(b"\x9f" * 200)
    assert b"".join(pieces_of(path, document_bytes=64)) == b"\x9f" * 200


def write_lines(path, n=100):
    """A text file in which each line is different, and begins with the path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{path} {number}\n" for number in range(n)))


def files_of(source, name):
    """The files that the documents of a split are from."""
    return {text.split()[0] for text in documents_of(source, name)}


def test_documents_of_one_file_are_on_one_side(tmp_path):
    """Unless there is only one file."""
    paths = [tmp_path / f"{i}.txt" for i in range(30)]
    for path in paths:
        write_lines(path)
    source = prepared(tmp_path, tmp_path / "cache", document_bytes=1024)
    assert files_of(source, "train") | files_of(source, "val") == set(map(str, paths))
    assert not files_of(source, "train") & files_of(source, "val")

    single = prepared(None, tmp_path / "cache", files=str(paths[0]), document_bytes=1024)
    assert min(split.documents for split in single.prepared.values()) > 0


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    """Under patterns of their own they would have one id, and so be one file, on one side of the split."""
    paths = [tmp_path / folder / "t.txt" for folder in ("a", "b", "b/a", "c")]
    for path in paths:
        write_lines(path)
    patterns = [str(path.with_name("*.txt")) for path in paths]
    files = matching_files(patterns)
    assert sorted(path for _, path in files) == sorted(paths)
    assert {name for name, _ in files} == {f"{tmp_path.name}/a/t.txt", "b/a/t.txt", "b/t.txt", "c/t.txt"}

    source = prepared(None, tmp_path / "cache", files=patterns, document_bytes=1024)
    assert not files_of(source, "train") & files_of(source, "val")
    assert sum(len(np.unique(split.files)) for split in source.prepared.values()) == 4


def test_links_that_lead_back_are_followed_once(tmp_path):
    root = write_corpus(tmp_path / "corpus", documents=3)
    elsewhere = write_corpus(tmp_path / "elsewhere", documents=1)
    names = set(dict(matching_files([f"{root}/**/*.txt"])))
    for i, target in enumerate((root, root / "part0", tmp_path, elsewhere)):
        (root / "part1" / f"link{i}").symlink_to(target)
        (root / f"z{i}").symlink_to(target)
    files = dict(matching_files([f"{root}/**/*.txt"]))
    files_elsewhere = set(elsewhere.rglob("*.txt"))
    through_link = {f"part1/link3/{path.relative_to(elsewhere).as_posix()}" for path in files_elsewhere}
    assert set(files) == names | through_link
    assert set(files.values()) == set(root.rglob("*.txt")) | files_elsewhere


IN_PART0 = {"00.txt", "03.txt"}
ALL = {"part0/00.txt", "part0/03.txt", "part1/01.txt", "part2/02.txt", "empty.txt", "latin.txt"}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["{root}/**/*.txt"], ALL),
        (["{root}/**"], ALL),
        (["{root}/**/*.txt", "{root}/part0/*.txt"], ALL),
        (["**/*.txt"], ALL),
        (["part0/*.txt"], IN_PART0),
        (["part0/00.txt"], {"00.txt"}),
        (["part[12]/*"], {"part1/01.txt", "part2/02.txt"}),
        (["part*/00.txt", "empty.txt", "{root}/latin.txt"], {"part0/00.txt", "empty.txt", "latin.txt"}),
    ],
)
def test_matching_files(tmp_path, monkeypatch, patterns, expected):
    root = write_corpus(tmp_path / "corpus", documents=4)
    monkeypatch.chdir(root)
    files = matching_files([pattern.format(root=root) for pattern in patterns])
    assert sorted(name for name, _ in files) == sorted(expected)
    assert len({path for _, path in files}) == len(expected)


def test_what_exists_is_no_pattern(tmp_path, monkeypatch):
    """A bracket or question mark in the name of a file or folder is itself."""
    monkeypatch.chdir(tmp_path)
    names = ["run [2024]/a.txt", "run [2024]/b.txt", "a[1].txt", "a1.txt", "who?.txt", "whom.txt"]
    for name in names:
        write_lines(tmp_path / name)
    for pattern, expected in (("run [2024]/*.txt", names[:2]), ("a[1].txt", ["a[1].txt"]), ("who?.txt", ["who?.txt"])):
        paths = [path for _, path in matching_files([pattern])]
        assert sorted(paths) == [tmp_path / name for name in expected]
    with pytest.raises(ValueError, match=r"data\.files=b\[1\]\.txt matches no file .*\[\[\] stands for a bracket"):
        matching_files(["b[1].txt"])


def test_patterns_without_a_file_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(write_corpus(tmp_path / "corpus"))
    with pytest.raises(ValueError, match=r"data\.files=\*\.text matches no file \(seen from .*corpus\)"):
        matching_files(["*.txt", "*.text"])
    for folder in ("part0", "."):
        with pytest.raises(ValueError, match=rf"data\.files={folder} matches .*data\.files='FOLDER/\*\*/\*'"):
            matching_files([folder])


def test_files_that_cannot_be_read_are_named(tmp_path):
    source = read_files([("gone", tmp_path / "gone.txt")])
    for read in (source.fingerprint, lambda: list(source.documents())):
        with pytest.raises(ValueError, match=r"gone\.txt cannot be read: No such file"):
            read()
    (tmp_path / "wide.txt").write_text("some text", encoding="utf-16")
    with pytest.raises(ValueError, match=r"wide\.txt has NUL bytes, as UTF-16 .* convert"):
        prepared(tmp_path, tmp_path / "cache")


def test_the_standard_library(tmp_path):
    names = {name for name, _ in stdlib_files()}
    assert {"abc.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    folders = {folder for name in names for folder in name.split("/")}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "encodings"}

    source = prepared(None, tmp_path, "StdlibCode", val_fraction=0.1, tokenizer="bytes")
    val_bytes = source.prepared["val"].bytes
    all_bytes = source.prepared["train"].bytes + val_bytes
    assert all_bytes > 5e6
    assert 0.05 < val_bytes / all_bytes < 0.2


TEXTS = [f"row {i} " + "wörd " * (i % 7) for i in range(50)]


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A folder with the same rows in every format that `datasets` reads from disk."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    table = datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(50))})
    table.to_json(tmp_path / "t.json")
    table.save_to_disk(tmp_path / "arrow")
    for kind in ("string", "large_string", "string_view"):
        column = pyarrow.array(TEXTS).cast(getattr(pyarrow, kind)())
        parquet.write_table(pyarrow.table({"text": column, "number": range(50)}), tmp_path / f"{kind}.parquet")
    return tmp_path


FORMATS = ["string.parquet", "large_string.parquet", "string_view.parquet", "t.json", "arrow/*.arrow"]


@pytest.mark.parametrize("file", FORMATS)
def test_local_datasets(rows, file):
    cache = rows / "cache"
    for _ in range(2):  # the second finds what the first has made
        source = prepared(None, cache, "HuggingFace", path=file.rpartition(".")[2], data_files=str(rows / file))
    texts = documents_of(source, "train") + documents_of(source, "val")
    assert sorted(texts) == sorted(TEXTS)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


NO_TEXT = r"no column of text in parquet: it has text \(string\), number \(int64\)"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("TextFiles", {"files": []}, r"data\.files is missing"),
        ("TextFiles", {"files": "x", "document_bytes": 0}, r"data\.document_bytes=0"),
        ("StdlibCode", {"val_fraction": 1.0}, r"data\.val_fraction=1 must be"),
        ("HuggingFace", {"path": None}, r"data\.path is missing"),
        ("HuggingFace", {"text_field": "txt"}, rf"data\.text_field=txt is {NO_TEXT}"),
        ("HuggingFace", {"text_field": "number"}, rf"data\.text_field=number is {NO_TEXT}"),
        ("HuggingFace", {"split": "dev"}, r"parquet could not be loaded.*data\.split=dev.*offline, use"),
        ("HuggingFace", {"path": "json"}, r"data\.path=json could not be loaded"),
    ],
)
def test_bad_options(rows, kind, options, message):
    if kind == "HuggingFace":
        options = {"path": "parquet", "data_files": str(rows / "string.parquet")} | options
    with pytest.raises(ValueError, match=message):
        prepared(None, rows / "cache", kind, **options)
    assert not (rows / "cache").exists()


def test_only_data_classes_of_known_packages_are_built(tmp_path, monkeypatch):
    """Those of a user's own are named by ROPEWALK_PLUGINS."""
    (tmp_path / "own.py").write_text("from pathlib import Path\nfrom data.text import StdlibCode as Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="it is outside of data"):
        data.resolve("own.Mine")
    assert "own" not in sys.modules
    monkeypatch.setenv("ROPEWALK_PLUGINS", "own, other")
    assert data.build_data({"_target_": "own.Mine", "name": "mine", "val_fraction": 0.2}).val_fraction == 0.2

    for target in ["os.system", "data.nothing.X", "database.X", "data.text.np.save", "data.text.TextData", "own.Path"]:
        with pytest.raises(ValueError, match=r"is not a Data class .*ROPEWALK_PLUGINS"):
            data.resolve(target)


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "data").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_option_stands_in_its_yaml_with_its_default(path):
    """A configuration file documents its class: no option is missing, none invented, none has another default."""
    config = OmegaConf.load(path)
    for parent in config.pop("defaults", []):
        if parent != "_self_":
            config = OmegaConf.merge(OmegaConf.load(path.with_name(f"{parent}.yaml")), config)
    values = OmegaConf.to_container(config)
    cls = data.resolve(values.pop("_target_"))
    assert values.pop("name") == path.stem == (cls.task or cls.label)

    defaults = {}
    for parameter in inspect.signature(cls).parameters.values():
        default = parameter.default
        defaults[parameter.name] = list(default) if isinstance(default, tuple) else default
    assert values == defaults


def test_a_run_of_an_older_version_has_the_options_of_today():
    older = {"_target_": "data.text.TextFiles", "name": "text", "files": "x", "min_tokens": 7, "lengths": None}
    source = data.build_data(current_options(older))
    assert (source.min_tokens, source.bos) == (7, "auto")
    with pytest.raises(ValueError, match=r"data\.lengths: there is no such key"):
        data.build_data(current_options(older | {"lengths": {0: 1.0}}))
