"""Files of tables, of which one column is read: its texts, row by row. No other column matters, nor do other files."""

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

Texts = Iterator[str | None]


def read(path: Path, kind: str, column: str) -> Texts:
    """Yield the text of each row of a file; None where there is none.

    Args:
        kind: one of FORMATS. Of json and csv the file may be compressed, as in .jsonl.gz or .csv.zst.
        column: the one that holds the text.

    Raises:
        ValueError: the file is damaged or of another format, or has no such column of text.
    """
    try:
        yield from FORMATS[kind](path, column)
    except (pyarrow.ArrowException, csv.Error, ValueError, RecursionError) as error:
        reason = str(error).strip().split("\n")[0][:500]
        raise ValueError(f"data.path={kind}: {path} cannot be read: {reason}") from None


def check_column(column: str, schema: pyarrow.Schema) -> None:
    """Raise ValueError unless `column` is one of text."""
    kind = None
    if column in schema.names:
        kind = schema.field(column).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise _no_column(column, [f"{field.name} ({field.type})" for field in schema])


def _no_column(column: str, names: Iterable[str]) -> ValueError:
    return ValueError(f"data.text_field={column} is not a column of text; the columns are: {', '.join(names)}")


def _parquet(path: Path, column: str) -> Texts:
    with parquet.ParquetFile(path) as file:
        check_column(column, file.schema_arrow)
        for batch in file.iter_batches(1000, columns=[column]):
            yield from batch.column(0).to_pylist()


def _arrow(path: Path, column: str) -> Texts:
    with pyarrow.memory_map(str(path)) as file:
        try:
            table = pyarrow.ipc.open_stream(file).read_all()  # as `datasets` writes them
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(file).read_all()
        check_column(column, table.schema)
        for chunk in table.column(column).chunks:
            yield from chunk.to_pylist()


def _json(path: Path, column: str) -> Texts:
    has_column = False
    names: dict[str, Any] = {}
    with _opened(path) as file:
        for number, row in enumerate(_json_rows(file), 1):
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is not an object: write one per line, or a list of them")
            text = row.get(column)
            if not isinstance(text, str | None):
                raise ValueError(f"data.text_field={column} is {type(text).__name__} in row {number}, not text")
            # Where there is no text, a row may leave the column out; but then another row has it.
            has_column |= column in row
            names |= dict.fromkeys(row)
            yield text
    if names and not has_column:
        raise _no_column(column, names)


def _json_rows(file: io.TextIOWrapper) -> Iterator[Any]:
    """The values in a file, which has one a line, or all in a list."""
    lines = (line for line in file if line.strip())
    first = next(lines, "")
    if first.lstrip().startswith("["):
        yield from json.loads(first + "".join(lines))
    elif first:
        yield from map(json.loads, itertools.chain([first], lines))


def _csv(path: Path, column: str) -> Texts:
    csv.field_size_limit(2**31 - 1)  # instead of 128 kB
    with _opened(path) as file:
        rows = csv.DictReader(file, delimiter="\t" if ".tsv" in path.suffixes else ",", strict=True)
        if column not in (rows.fieldnames or ()):
            raise _no_column(column, rows.fieldnames or ())
        for row in rows:
            yield row[column]


def _opened(path: Path) -> io.TextIOWrapper:
    """A file of text, decompressed by its name. Bytes that are no UTF-8 become surrogates."""
    stream: Any = pyarrow.input_stream(str(path), compression="detect")
    return io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")


FORMATS: dict[str, Callable[[Path, str], Texts]] = {
    "parquet": _parquet,
    "json": _json,
    "csv": _csv,
    "arrow": _arrow,
}
