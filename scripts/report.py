"""Compare runs: one page to look at and to send on, or the same tables as Markdown or CSV.

Runs that differ only in the seed are one line. Results on other texts are in a table of their own.

python scripts/report.py                                   all runs in runs/: writes runs/report.html
python scripts/report.py 'folders=[runs,more/runs]' out=table.md
python scripts/report.py 'only=[rope-*,yarn-*]' 'exclude=[*-s1]'       only runs with such names
python scripts/report.py folders=runs format=csv reference=alibi       to the terminal
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from app.cli import program
from common.files import printable, write_text
from conf.schema import ConfigError, Section
from evaluation.report import frame, page


class Arguments(Section):
    folders: Annotated[list[str], Field(min_length=1)] | str
    format: Literal["html", "md", "csv"] | None
    out: str | None
    reference: str
    only: list[str]
    exclude: list[str]


@program("report", Arguments)
def main(args: Arguments) -> None:
    folders = [args.folders] if isinstance(args.folders, str) else args.folders
    runs = frame.load(folders, args.only, args.exclude)
    if runs.runs.empty and not runs.left_out:
        asked = f" with a name as in only={args.only} exclude={args.exclude}" if args.only or args.exclude else ""
        raise ConfigError(f"no run{asked} lies in {', '.join(folders)}: a run is a directory with a config.yaml")
    kind = args.format or _format_of(args.out)
    writers = {"html": page.html, "md": page.markdown, "csv": page.csv}
    text = writers[kind](runs, args.reference)
    if kind != "html":
        text = printable(text)
    for path, reason in runs.left_out:
        print(f"left out: {path}: {reason}", file=sys.stderr)
    if kind != "html" and args.out is None:
        sys.stdout.write(text)
        return
    out = Path(args.out or Path(folders[0]) / page.PAGE)
    write_text(out, text)
    print(f"wrote {out}: {sum(runs.runs.get('done', []))} complete runs, {len(runs.left_out)} left out")


def _format_of(out: str | None) -> str:
    """The format that a file's name asks for; a page by default."""
    suffix = Path(out or "").suffix
    return suffix.removeprefix(".") if suffix in (".md", ".csv") else "html"


if __name__ == "__main__":
    main()
