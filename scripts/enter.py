"""Enter an encoding into the board: train what is missing, and end with one line.

make board PE=board/2026-11-30-mine
python scripts/enter.py entry=board/2026-11-30-mine      the same; the same command resumes
python scripts/enter.py                                   only the page, from the verdicts that are there

An entry is a folder: see docs/board.md. Its seeds and texts are drawn from the commit that changed it last; `commit=`
names another, as the check of a pull request does. An entry that was judged as it is now is not judged again.
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.enter")

import subprocess
from pathlib import Path

from conf.schema import ConfigError, Section
from lab.board import board, page, rules
from ropewalk.app.cli import program, quoted
from ropewalk.files import write_json, write_text


class Arguments(Section):
    entry: str | None
    commit: str | None
    board: str
    page: str
    runs_dir: str
    track: list[str]


@program("enter", Arguments)
def main(args: Arguments) -> None:
    if args.entry:
        entry = board.load(Path(args.entry))
        known = {(v.entry, v.source): v.commit for v in board.verdicts(entry.folder.parent)}
        judged_at = known.get((entry.folder.name, entry.source))
        if judged_at is None or args.commit not in (None, judged_at):
            options = [*args.track, f"runs_dir={quoted(args.runs_dir)}"]
            verdict = board.judged(entry, args.commit or commit_of(entry.folder), options)
            write_json(entry.folder / "verdict.json", verdict.model_dump())
    rows = rules.standings(board.verdicts(Path(args.board)))
    out = Path(args.page)
    if rows:
        page.draw(rows, out.with_suffix(".svg"))
    write_text(out, page.markdown(rows, f"{out.stem}.svg"))
    for row in rows:
        if args.entry and row.verdict.entry == Path(args.entry).name:
            print(page.line(row))


def commit_of(folder: Path) -> str:
    """The commit that changed an entry last. Raises ConfigError: there is none."""
    command = ["git", "status", "--porcelain", "--", "pe.yaml", "encoding.py"]
    changed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    command = ["git", "log", "-1", "--format=%H", "--", "pe.yaml", "encoding.py"]
    commit = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.strip()
    if changed.stdout or not commit:
        raise ConfigError(f"commit {folder} first: its seeds and texts are drawn from the commit")
    return commit
