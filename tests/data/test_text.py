"""Where documents come from, which options are refused, and which classes a configuration may name."""

import inspect
import math
import sys

import numpy as np
import pytest
from conftest import ROOT
from corpora import documents_of, prepared, write_corpus
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from data import base as data
from data.text import matching_files, read_files, stdlib_files


@given(lines=st.lists(st.integers(0, 200), max_size=12), size=st.integers(1, 90))
@example(lines=[1, 1], size=2)  # the last line has no end, and belongs to the first piece
def test_pieces_of_any_file(tmp_path_factory, lines, size):
    """`lines` are the lengths of a file's lines; each is of another letter."""
    letters = b"abcdefghijkl"
    path = tmp_path_factory.mktemp("pieces") / "a"
    path.write_bytes(b"\n".join(letters[i : i + 1] * length for i, length in enumerate(lines)))
    pieces = []
    for i, (name, piece) in enumerate(read_files([("a", path)], document_bytes=size).documents()):
        assert name == f"a#{i}"
        assert len(piece) <= 2 * size
        pieces.append(piece)
    assert b"".join(pieces) == path.read_bytes()
    if max(lines, default=0) < size:  # a longer line is cut
        end = 0
        for piece in pieces:
            end += len(piece)
            assert piece.endswith(b"\n") or end in (0, path.stat().st_size)


def test_documents_of_one_file_are_on_one_side(tmp_path):
    """Unless there is only one file."""
    for i in range(30):
        lines = [f"{i} {number}\n" for number in range(100)]  # documents that are repeated do not count
        (tmp_path / f"{i}.txt").write_text("".join(lines))
    source = prepared(tmp_path, tmp_path / "cache", document_bytes=128)
    files_of_train = [text.split()[0] for text in documents_of(source, "train")]
    files_of_val = [text.split()[0] for text in documents_of(source, "val")]
    assert len(files_of_train) + len(files_of_val) > 100
    assert set(files_of_train) | set(files_of_val) == set(map(str, range(30)))
    assert not set(files_of_train) & set(files_of_val)

    single = prepared(None, tmp_path / "cache", files=str(tmp_path / "7.txt"), document_bytes=128)
    assert min(split.documents for split in single.prepared.values()) > 0


def pieces_of(path, document_bytes):
    return [piece for _, piece in read_files([("a", path)], document_bytes=document_bytes).documents()]


@pytest.mark.parametrize("character", ["é", "漢", "👩"])
def test_a_long_line_is_cut_between_characters(tmp_path, character):
    """In UTF-8: other files are cut at any byte, but nothing is lost."""
    path = tmp_path / "a"
    for before in range(4):
        in_utf8 = "a" * before + character * 200
        in_latin_1 = "a" * before + "\x9f" * 200
        for content in (in_utf8.encode(), in_latin_1.encode("latin-1")):
            path.write_bytes(content)
            pieces = pieces_of(path, document_bytes=64)
            assert b"".join(pieces) == content
            assert len(pieces) == math.ceil(len(content) / 64)
            assert max(map(len, pieces)) <= 128
            if content == in_utf8.encode():
                for piece in pieces:
                    piece.decode()  # a cut character is an error


def test_links_that_lead_back_are_followed_once(tmp_path):
    root = write_corpus(tmp_path / "corpus", documents=3)
    elsewhere = write_corpus(tmp_path / "elsewhere", documents=1)
    pattern = f"{root}/**/*.txt"
    names = set(dict(matching_files([pattern])))
    for i, target in enumerate((root, root / "part0", tmp_path, elsewhere)):
        (root / "part1" / f"link{i}").symlink_to(target)
        (root / f"z{i}").symlink_to(target)
    path_of_name = dict(matching_files([pattern]))
    files_elsewhere = set(elsewhere.rglob("*.txt"))
    through_link = {f"part1/link3/{path.relative_to(elsewhere).as_posix()}" for path in files_elsewhere}
    assert set(path_of_name) == names | through_link
    assert set(path_of_name.values()) == set(root.rglob("*.txt")) | files_elsewhere


def test_matching_files(tmp_path, monkeypatch):
    root = write_corpus(tmp_path / "corpus")
    names = {path.relative_to(root).as_posix() for path in root.rglob("*.txt")}
    names_in_part0 = {path.name for path in (root / "part0").iterdir()}
    monkeypatch.chdir(root)
    for patterns, expected in [
        ([f"{root}/**/*.txt"], names),
        ([f"{root}/**/*.txt", f"{root}/part0/*.txt"], names),
        (["**/*.txt"], names),
        (["part0/*.txt"], names_in_part0),
        (["part0/00.txt"], {"00.txt"}),
        (["part*/00.txt", "empty.txt", f"{root}/latin.txt"], {"part0/00.txt", "empty.txt", "latin.txt"}),
    ]:
        files = matching_files(patterns)
        names_found, paths_found = zip(*files, strict=True)
        assert set(names_found) == expected
        assert len(files) == len(expected)
        assert len(set(paths_found)) == len(expected)
    with pytest.raises(ValueError, match=r"data\.files=\*\.text matches no file \(seen from .*corpus\)"):
        matching_files(["*.txt", "*.text"])
    with pytest.raises(ValueError, match=r"data\.files=part0 matches .*data\.files='FOLDER/\*\*/\*'"):
        matching_files(["part0"])


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    """Under patterns of their own they would have one id, and so be one file, on one side of the split."""
    folders = ["a", "b", "b/a", "c"]
    for folder in folders:
        (tmp_path / folder).mkdir(exist_ok=True)
        lines = [f"{folder} {number}\n" for number in range(100)]
        (tmp_path / folder / "t.txt").write_text("".join(lines))
    (tmp_path / "c" / "only.txt").write_text("only\n")
    patterns = [str(tmp_path / folder / "*.txt") for folder in folders]
    files = matching_files(patterns)
    expected = {name: tmp_path / name for name in ("b/t.txt", "c/t.txt", "b/a/t.txt")}
    # Where one folder does not tell files apart, the ids are longer still.
    expected |= {f"{tmp_path.name}/a/t.txt": tmp_path / "a" / "t.txt", "only.txt": tmp_path / "c" / "only.txt"}
    assert dict(files) == expected
    assert len(files) == 5

    source = prepared(None, tmp_path / "cache", files=patterns, document_bytes=128)
    files_of_split = {name: {text.split()[0] for text in documents_of(source, name)} for name in ("train", "val")}
    assert files_of_split["train"] | files_of_split["val"] == {*folders, "only"}
    assert not files_of_split["train"] & files_of_split["val"]
    assert sum(len(np.unique(split.files)) for split in source.prepared.values()) == 5


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
    names = {name for name, _ in stdlib_files()}
    assert {"abc.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    left_out = {"test", "tests", "idle_test", "site-packages", "encodings"}
    for name in names:
        assert not left_out & set(name.split("/")), name

    source = prepared(None, tmp_path, "StdlibCode", val_fraction=0.1)
    val_bytes = source.prepared["val"].bytes
    all_bytes = source.prepared["train"].bytes + val_bytes
    assert all_bytes > 5e6
    assert 0.05 < val_bytes / all_bytes < 0.2
    assert source.eval_sets([128, 2048], target_tokens=64, sequences=64)[0].n == 64
    x, _ = source.train_batch(range(64), 256, 0)
    assert "def " in source.decode(x.flatten().tolist())


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The same rows in every format that `datasets` reads from disk."""
    import datasets

    root = tmp_path_factory.mktemp("rows")
    texts = [f"row {i} " + "word " * (i % 7) for i in range(50)]
    table = datasets.Dataset.from_dict({"text": texts, "number": list(range(50))})
    table.to_parquet(root / "t.parquet")
    table.to_json(root / "t.json")
    table.save_to_disk(root / "arrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "hf")
        yield root, texts


def test_local_files_without_rows_are_named(rows, tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).select([]).to_parquet(tmp_path / "none.parquet")
    (tmp_path / "bad.json").write_text('{"text": "a"')
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"data\.path=parquet .*(each file has rows|0 documents)"):
        prepared(None, cache, "HuggingFace", path="parquet", data_files=str(tmp_path / "none.parquet"))
    with pytest.raises(ValueError, match=r"data\.path=json could not be loaded \(ArrowInvalid: JSON parse error"):
        prepared(None, cache, "HuggingFace", path="json", data_files=str(tmp_path / "bad.json"))


@pytest.mark.parametrize("file", ["t.parquet", "t.json", "arrow/*.arrow"])
def test_local_datasets(rows, tmp_path, file):
    root, texts = rows
    cache = tmp_path / "cache"
    file_type = file.rpartition(".")[2]
    for _ in range(2):  # the second finds what the first has made
        source = prepared(None, cache, "HuggingFace", path=file_type, data_files=str(root / file))
    train = source.prepared["train"]
    val = source.prepared["val"]
    assert train.documents + val.documents == 50
    assert val.documents > 2
    assert train.bytes + val.bytes == sum(map(len, texts))
    prepared_once = [path for path in cache.iterdir() if path.is_dir()]
    assert len(prepared_once) == 1


def test_bad_options(rows, tmp_path):
    root, _ = rows
    parquet = {"path": "parquet", "data_files": str(root / "t.parquet")}
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
    mine = data.build_data({"_target_": "own.Mine", "name": "mine", "val_fraction": 0.2})
    assert mine.label == "code"
    for target in (
        "os.system",
        "data.text.np.save",
        "data.text.TextData",
        "data.text.TextData.prepare",
        "data.nothing.X",
        "data.text.Path",
        "Data",
        "database.X",
        "own_data.Own",
        "own.Path",
    ):
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
        assert parameter.kind is parameter.KEYWORD_ONLY
        default = parameter.default
        defaults[parameter.name] = list(default) if isinstance(default, tuple) else default
    assert values == defaults
