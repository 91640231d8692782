"""Compare runs: one page to look at and to send on, or the same tables as Markdown or CSV.

Runs that differ only in the seed are one line. Results on other texts are in a table of their own.

python scripts/report.py                                   all runs in runs/: writes runs/report.html
python scripts/report.py 'folders=[runs,more/runs]' out=table.md
python scripts/report.py 'only=[rope-*,yarn-*]' 'exclude=[*-s1]'       only runs with such names
python scripts/report.py folders=runs format=csv reference=alibi       to the terminal
python scripts/report.py out=all.jsonl.gz                               all results in one file, for folders=
python scripts/report.py 'folders=[docs/results/markov.jsonl.gz,runs]'  yours beside published ones
python scripts/report.py out=gain.pdf 'only=[rope-*,kerple-*]'          the first figure as a picture; also .svg, .png
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.report")

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from conf.schema import ConfigError, Section
from ropewalk.app.cli import program
from ropewalk.files import is_stream, printable, write_out
from ropewalk.report import frame, page

PICTURES = ("svg", "png", "pdf")


class Arguments(Section):
    folders: Annotated[list[str], Field(min_length=1)] | str
    format: Literal["html", "md", "csv", "svg", "png", "pdf", "jsonl.gz"] | None
    out: str | None
    reference: str
    only: list[str]
    exclude: list[str]


@program("report", Arguments)
def main(args: Arguments) -> None:
    folders = args.folders
    if isinstance(folders, str):
        folders = [folders]
    runs = frame.load(folders, args.only, args.exclude)
    if runs.runs.empty and not runs.left_out:
        asked = ""
        if args.only or args.exclude:
            asked = f" with a name as in only={args.only} exclude={args.exclude}"
        raise ConfigError(f"no run{asked} lies in {', '.join(folders)}: a run is a directory with a config.yaml")

    kind = args.format or _format_of(args.out)
    for path, reason in runs.left_out:
        print(f"left out: {path}: {reason}", file=sys.stderr)
    if kind in ("md", "csv") and args.out is None:
        sys.stdout.write(printable(_text(runs, kind, args.reference)))
        return

    # All other formats are files, which are written whole or not at all, unless the user names a stream.
    usual_name = Path(page.PAGE).with_suffix(f".{kind}")
    out = Path(args.out or Path(folders[0], usual_name))
    if kind == "jsonl.gz":
        frame.save(out, folders, args.only, args.exclude)
    elif kind in PICTURES:
        write_out(out, page.picture(runs, kind, args.reference))
    else:
        write_out(out, _text(runs, kind, args.reference).encode())

    complete = sum(runs.runs.get("done", []))
    summary = f"wrote {out}: {complete} complete runs, {len(runs.left_out)} left out"
    print(summary, file=sys.stderr if is_stream(out) else sys.stdout)  # a stream has the report alone


def _text(runs: frame.Runs, kind: str, reference: str) -> str:
    """Return the report as text of a kind."""
    writers = {"html": page.html, "md": page.markdown, "csv": page.csv}
    text = writers[kind](runs, reference)
    return text if kind == "html" else printable(text)


def _format_of(out: str | None) -> str:
    """The format that a file's name asks for; a page by default."""
    for kind in ("md", "csv", *PICTURES, "jsonl.gz"):
        if out and out.endswith(f".{kind}"):
            return kind
    return "html"
