"""Compare runs: one page to look at and to share, or the same tables as Markdown or CSV.

Runs that differ only in the seed are one line. Results on other texts are in a table of their own.

python scripts/report.py                                   all runs in runs/: writes runs/report.html
python scripts/report.py 'folders=[runs,more/runs]' out=table.md
python scripts/report.py 'only=[rope-*,yarn-*]' 'exclude=[*-s1]'       only runs with such names
python scripts/report.py folders=runs format=csv reference=alibi       to the terminal
python scripts/report.py out=all.parquet                               all but by_position in one file, for folders=
python scripts/report.py 'folders=[docs/results/markov.parquet,runs]'  yours beside published ones
python scripts/report.py out=gain.pdf 'only=[rope-*,kerple-*]'          the first figure as a picture; also .svg, .png
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.report")

import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from conf.errors import ConfigError
from conf.files import printable, write_bytes, write_text
from conf.schema import Section
from ropewalk.evaluation import archive
from ropewalk.report import frame, page, table

Format = Literal["html", "md", "csv", "svg", "png", "pdf", "parquet"]
TEXTS = {"md": page.markdown, "csv": page.csv}  # without out=, to the terminal


class Arguments(Section):
    folders: Annotated[
        list[str],
        Field(min_length=1),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ]
    format: Format | None
    out: str | None
    reference: str
    only: list[str]
    exclude: list[str]
    title: bool


def main(args: Arguments) -> None:
    kind = format_of(args)
    runs = frame.load(args.folders, args.only, args.exclude)
    if runs.runs.empty and not runs.left_out:
        asked = f" with a name that fits only={args.only} exclude={args.exclude}" if args.only or args.exclude else ""
        raise ConfigError(f"no run{asked} is in {', '.join(args.folders)}: a run is a directory with a config.yaml")
    out = place_of(args, kind)
    write(out, kind, runs, args)
    for path, reason in runs.left_out:
        print(f"left out: {path}: {reason}", file=sys.stderr)
    if out:
        print(f"wrote {out}: {sum(runs.runs.get('done', []))} complete runs, {len(runs.left_out)} left out")


def format_of(args: Arguments) -> str:
    """Return the format that is asked for, perhaps by the file's name; a page by default."""
    kind = args.format or Path(args.out or page.PAGE).suffix.removeprefix(".")
    if kind not in get_args(Format):
        raise ConfigError(f"out={args.out}: its extension must be one of .{', .'.join(get_args(Format))}")
    return kind


def place_of(args: Arguments, kind: str) -> Path | None:
    """Return the file to write; None: the terminal, to which a text goes that no file was named for."""
    if args.out:
        return Path(args.out)
    if kind in TEXTS:
        return None
    # In the first folder, as some of `folders` may be files of results; without one where the program runs.
    folder = next(filter(Path.is_dir, map(Path, args.folders)), Path())
    return folder / Path(page.PAGE).with_suffix(f".{kind}")


def write(out: Path | None, kind: str, runs: frame.Runs, args: Arguments) -> None:
    """Write the runs in one of the formats; a text without a file to the terminal."""
    if kind in TEXTS:
        text = printable(TEXTS[kind](runs, args.reference))
        if out:
            write_text(out, text)
        else:
            sys.stdout.write(text)
        return
    assert out
    if kind == "parquet":
        archive.write(out, runs.runs, runs.results)
    elif kind == "html":
        write_text(out, page.html(runs, args.reference))
    else:
        write_bytes(out, picture(kind, runs, args))


def picture(kind: str, runs: frame.Runs, args: Arguments) -> bytes:
    """Return the first figure of the page."""
    from ropewalk.report import plot  # which takes long to import

    rows = table.results(runs, args.reference)
    is_of_task = set(table.headline(rows).quantity) == {"error"}
    ax = (plot.errors if is_of_task else plot.gain)(rows, plot.new())
    return plot.written(ax if args.title else plot.untitled(ax), kind)
