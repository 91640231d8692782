"""Where documents come from, which options are refused, and which classes a configuration may name."""

import inspect
import json

import pandas
import pyarrow
import pytest
from conftest import ROOT, data_options
from corpora import documents_of, prepared, write_corpus
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from conf import plugins
from data import base as data
from data.text import matching_files, read_files, stdlib_files


def pieces_of(folder, content, document_bytes):
    """The documents that a file of these bytes is cut into."""
    path = folder / "a"
    path.write_bytes(content)
    source = read_files([("a", path)], document_bytes)
    return [piece for _, piece in source.documents()]


@settings(max_examples=50)
@given(
    lines=st.lists(st.integers(0, 200), max_size=12),
    size=st.integers(1, 90),
    mark=st.booleans(),
)
@example(lines=[1, 1], size=2, mark=False)  # the last line has no end, and belongs to the first piece
def test_the_pieces_of_any_file_are_its_bytes_cut_between_lines(tmp_path_factory, lines, size, mark):
    """`lines` are the lengths of a file's lines; each is of another letter. A byte order mark is no text."""
    letters = b"abcdefghijkl"
    text = b"\n".join(letters[i : i + 1] * length for i, length in enumerate(lines))
    byte_order_mark = b"\xef\xbb\xbf" if mark else b""

    pieces = pieces_of(tmp_path_factory.mktemp("pieces"), byte_order_mark + text, size)

    assert b"".join(pieces) == text
    assert max(map(len, pieces), default=0) <= 2 * size

    if max(lines, default=0) < size:  # a longer line is cut
        full = [piece for piece in pieces if piece]
        assert all(piece.endswith(b"\n") for piece in full[:-1])


# The last is no UTF-8 at all.
@pytest.mark.parametrize("character", ["é".encode(), "漢".encode(), "👩".encode(), b"\x9f"])
@pytest.mark.parametrize("before", range(4))
def test_a_long_line_is_cut_between_characters_and_nothing_is_lost(tmp_path, before, character):
    text = b"a" * before + character * 200

    pieces = pieces_of(tmp_path, text, 64)

    assert b"".join(pieces) == text
    assert max(map(len, pieces)) <= 128

    for piece in pieces[1:]:
        assert piece == character * (len(piece) // len(character))


def write_lines(path, n=100):
    """A text file in which each line is different, and begins with the path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{path} {number}\n" for number in range(n)))


def test_documents_of_one_of_several_files_are_on_one_side(tmp_path):
    paths = [tmp_path / f"{i}.txt" for i in range(30)]
    for path in paths:
        write_lines(path)

    source = prepared(tmp_path, tmp_path / "cache", document_bytes=1024)
    prepared(
        None,
        tmp_path / "cache",
        files=str(paths[0]),
        document_bytes=1024,
    )  # both sides have documents

    train, val = ({text.split()[0] for text in documents_of(source, name)} for name in ("train", "val"))

    assert train | val == set(map(str, paths))
    assert not train & val


OF_ONE_NAME = ["part0/t.md", "part1/t.md", "part1/part0/t.md"]
WITH_WILDCARDS = ["a[1].md", "a1.md", "who?.md", "whom.md"]
ALL = ["empty.txt", "latin.txt", "part0/00.txt", "part0/03.txt", "part1/01.txt", "part2/02.txt"]


# A file is named by its path below the folder that all patterns start with.
PATTERNS = [
    (["{root}/**/*.txt"], ALL),
    (["{root}/part0/**"], ["00.txt", "03.txt", "t.md"]),
    (["{root}/**/*.txt", "{root}/part0/*.txt"], ALL),
    (["**/*.txt"], ALL),
    (["part0/00.txt"], ["00.txt"]),
    (["part[12]/*"], ["part1/01.txt", "part1/t.md", "part2/02.txt"]),
    (["part*/00.txt", "empty.txt", "{root}/latin.txt"], ["empty.txt", "latin.txt", "part0/00.txt"]),
    # Of one id they would be one file, on one side of the split.
    (["part0/*.md", "part1/t.md", "part1/part0/*"], ["part0/t.md", "part1/part0/t.md", "part1/t.md"]),
    # What exists is no pattern: its brackets and question marks are themselves.
    (["a[1].md"], ["a[1].md"]),
    (["who?.md"], ["who?.md"]),
]


@pytest.mark.parametrize(("patterns", "expected"), PATTERNS)
def test_which_files_a_pattern_matches_and_how_they_are_named(tmp_path, monkeypatch, patterns, expected):
    root = write_corpus(tmp_path / "corpus", documents=4)
    for name in (*OF_ONE_NAME, *WITH_WILDCARDS):
        write_lines(root / name)
    monkeypatch.chdir(root)

    files = matching_files([pattern.format(root=root) for pattern in patterns])

    assert sorted(name for name, _ in files) == expected
    assert len({path for _, path in files}) == len(files)


NO_MATCH = [
    ("*.text", r"data\.files=\*\.text matches no file \(relative to .*corpus\)"),
    (".", r"data\.files=\. matches .*data\.files='FOLDER/\*\*/\*'"),
    ("part0", r"data\.files=part0 matches .*data\.files='FOLDER/\*\*/\*'"),
    ("b[1].txt", r"data\.files=b\[1\]\.txt matches no file .*\[\[\] matches a bracket"),
]


@pytest.mark.parametrize(("pattern", "message"), NO_MATCH)
def test_patterns_without_a_file_are_named(tmp_path, monkeypatch, pattern, message):
    monkeypatch.chdir(write_corpus(tmp_path / "corpus", documents=1))
    with pytest.raises(ValueError, match=message):
        matching_files(["*.txt", pattern])


TEXTS = [f"row {i} " + "wörd " * (i % 7) for i in range(50)]
OTHERS = [None, "", "NA", "null", "nan", "a\r\nb", ' "quoted", with a comma', "\u2028 \x0b", "é" * 200_000]
ROWS = [{"text": text, "number": number} for number, text in enumerate(TEXTS + OTHERS)]


def write_rows(path, rows):
    """Rows as a file of the format that its name ends in, by other programs than ours reads it with."""
    kind = path.suffixes[0]
    if kind == ".parquet":
        pandas.DataFrame(rows).to_parquet(path, row_group_size=7)
    elif kind == ".arrow":
        with pyarrow.OSFile(str(path), "wb") as file:
            table = pyarrow.Table.from_pylist(rows)
            with pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table, max_chunksize=9)
    else:
        frame = pandas.DataFrame(rows)
        text = {
            ".csv": lambda: frame.to_csv(index=False),
            ".json": lambda: json.dumps(rows, indent=1),
            ".jsonl": lambda: frame.to_json(orient="records", lines=True, force_ascii=False),
        }[kind]()
        with pyarrow.output_stream(str(path)) as file:  # compressed as its name says
            file.write(text.encode())


@pytest.fixture
def rows(tmp_path):
    """A folder with the same rows in two files, whose texts are of different types."""
    for name, kind in {"string": pyarrow.string(), "view": pyarrow.string_view()}.items():
        table = pyarrow.table({"text": pyarrow.array(TEXTS, kind), "number": range(50)})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    return tmp_path


def of_rows(folder, path, data_files):
    """The documents of local files, and how many rows had no text."""
    source = prepared(None, folder / "cache", "HuggingFace", path=path, data_files=data_files)
    without = sum(split.without_text for split in source.prepared.values())
    return sorted(documents_of(source, "train") + documents_of(source, "val")), without


@pytest.mark.parametrize("file", ["string.parquet", "view.parquet"])
def test_local_files_of_either_type_of_text_are_prepared_once(rows, file):
    for _ in range(2):  # the second finds what the first has made
        assert of_rows(rows, "parquet", str(rows / file)) == (sorted(TEXTS), 0)

    assert len([path for path in (rows / "cache").iterdir() if path.is_dir()]) == 1


FILES = ["a.parquet", "a.arrow", "a.csv", "a.csv.gz", "a.json", "a.jsonl", "a.jsonl.gz", "a[1].jsonl.zst"]


@pytest.mark.parametrize("name", FILES)
def test_rows_are_documents_and_those_without_text_are_counted(tmp_path, name):
    """A text that looks like a missing value is a text, and its line ends are part of it."""
    write_rows(tmp_path / name, ROWS)
    kind = name.partition(".")[2].split(".")[0].removesuffix("l")

    texts, without = of_rows(tmp_path, kind, str(tmp_path / name))

    assert texts == sorted(TEXTS + OTHERS[2:])
    assert without == 2


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv", "json"])
def test_files_may_differ_in_their_other_columns(tmp_path, kind):
    write_rows(tmp_path / f"0.{kind}", [{"text": text, "more": None} for text in TEXTS[:20]])
    write_rows(tmp_path / f"1.{kind}", [{"more": 1.5, "text": text, "url": "u"} for text in TEXTS[20:]])

    assert of_rows(tmp_path, kind, [str(tmp_path / f"[01].{kind}")]) == (sorted(TEXTS), 0)


DAMAGED = {
    "a.json": (b'{"text": 5}', "int in row 1, not text"),
    "b.json": (b'{"text": "a"}\n["b"]', "row 2 is not an object"),
    "c.json": (b'{"text": "a"}\n{"text": ', "Expecting value"),
    "d.json": (b'{"body": "a"}', "not a column of text; the columns are: body"),
    "e.csv": (b"id;text\n1;a\n", "not a column of text; the columns are: id;text"),
    "f.csv": (b'text\n"a\nb', "unexpected end of data"),
    "g.parquet": (b"PAR1", "cannot be read"),
    "h.arrow": (b"x", "cannot be read"),
    "i.arrow": (b"", "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_with_the_reason(tmp_path, name):
    content, reason = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{reason}"):
        of_rows(tmp_path, name.partition(".")[2], str(tmp_path / name))


def test_code_is_the_source_of_the_standard_library_without_its_tests():
    names = {name for name, _ in stdlib_files()}

    assert {"argparse.py", "json/decoder.py"} <= names
    assert {name.rpartition(".")[2] for name in names} == {"py"}
    assert not {"test", "encodings"} & {name.partition("/")[0] for name in names}


NO_TEXT = r"not a column of text; the columns are: text \(string\), number \(int64\)"


BAD_OPTIONS = [
    ("TextFiles", {"files": []}, r"data\.files=\[\]: it should be"),
    ("TextFiles", {"files": "x", "document_bytes": 63}, r"data\.document_bytes=63"),
    ("StdlibCode", {"val_fraction": 1.0}, r"data\.val_fraction=1\.0: it should be less than 1"),
    ("HuggingFace", {"path": None}, r"data\.path=None: it should be a valid string"),
    ("HuggingFace", {"path": "json"}, r"data\.path=json: .*string\.parquet cannot be read"),
    ("HuggingFace", {"path": "text"}, r"data\.path=text would drop line ends: for plain text use data=text"),
    ("HuggingFace", {"text_field": "txt"}, rf"data\.text_field=txt is {NO_TEXT}"),
    ("HuggingFace", {"text_field": "number"}, rf"data\.text_field=number is {NO_TEXT}"),
    ("HuggingFace", {"split": "dev"}, r"data\.split=dev is for a dataset on the hub"),
    ("HuggingFace", {"subset": "en"}, r"data\.subset=en is for a dataset on the hub"),
    ("HuggingFace", {"data_files": None}, r"data\.path=parquet reads local files: name them with data\.data_files"),
    ("HuggingFace", {"data_files": "no.parquet"}, r"data\.data_files=no\.parquet matches no file"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD_OPTIONS)
def test_a_bad_option_is_an_error_before_anything_is_written(rows, kind, options, message):
    if kind == "HuggingFace":
        options = {"path": "parquet", "data_files": str(rows / "string.parquet")} | options
    with pytest.raises(ValueError, match=message):
        prepared(None, rows / "cache", kind, **options)

    assert not (rows / "cache").exists()


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "conf" / "data").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_every_option_stands_in_its_yaml_with_its_default(path):
    """A configuration file documents its class: no option is missing, none invented, none has another default."""
    values = data_options(path.stem)
    cls, values = plugins.resolve(values, data.Data, "data", "data")
    defaults = {}
    for parameter in inspect.signature(cls).parameters.values():
        default = "???" if parameter.default is parameter.empty else parameter.default
        defaults[parameter.name] = list(default) if isinstance(default, tuple) else default

    assert values.pop("name") == path.stem == (cls.task or cls.label)
    assert values == defaults
