"""Compare runs: one page to look at and to send on, or the same tables as Markdown or CSV.

python scripts/report.py runs                                 writes runs/report.html
python scripts/report.py runs --watch                         and again while runs train, until Ctrl-C
python scripts/report.py runs more/runs --out table.md        or table.csv; --format md alone: to the terminal
"""

import argparse
import sys
import time
from pathlib import Path

import conf.cli
from conf.rundir import write_atomically
from conf.schema import ConfigError
from evaluation import page, runs, tables
from evaluation.compare import Comparison, compare

PAUSE = 2.0  # seconds between two looks at the runs


def report(folders: list[Path], kind: str, out: Path | None) -> None:
    comparison = compare(folders)
    if not comparison.runs and not comparison.left_out:
        raise ConfigError(f"no run lies in {', '.join(map(str, folders))}: a run is a directory with a config.yaml")
    if kind == "html":
        out = out or folders[0] / page.PAGE
        page.write(comparison, out)
    else:
        text = tables.markdown(comparison) if kind == "md" else tables.as_csv(comparison)
        if out is None:
            sys.stdout.write(text)
            return
        write_atomically(out, text)
    announce(comparison, out)


def announce(comparison: Comparison, out: Path) -> None:
    print(f"wrote {out}: {len(comparison.runs)} runs; left out: {len(comparison.left_out)}", flush=True)


def watch(folders: list[Path], out: Path) -> None:
    """Rewrite the page whenever a file of a run has changed; the page loads itself anew until this ends."""
    seen = None
    try:
        while True:
            began = time.monotonic()
            if (now := runs.state(folders)) != seen:
                seen = now
                comparison = compare(folders)
                page.write(comparison, out, live=True)
                announce(comparison, out)
            time.sleep(max(PAUSE, 9 * (time.monotonic() - began)))  # a tenth of a core at most: the runs need it
    except KeyboardInterrupt:
        page.write(compare(folders), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run directories, or folders of them")
    parser.add_argument("--out", type=Path, help="file to write; default: report.html in the first folder")
    parser.add_argument("--format", choices=("html", "md", "csv"), help="default: that of --out, or html")
    parser.add_argument("--watch", action="store_true", help="rewrite the page while runs train")
    args = parser.parse_args()
    kind = args.format or {".md": "md", ".csv": "csv"}.get(args.out.suffix if args.out else "", "html")
    if args.watch and kind != "html":
        parser.error(f"--watch rewrites a page, not {kind}")
    try:
        if args.watch:
            watch(args.folders, args.out or args.folders[0] / page.PAGE)
        else:
            report(args.folders, kind, args.out)
    except (ValueError, OSError) as error:
        conf.cli.fail(error)


if __name__ == "__main__":
    main()
