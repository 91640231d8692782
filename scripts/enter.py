"""Enter an encoding into the board: train what is missing, and end with one line.

make board PE=board/2026-11-30-mine
python scripts/enter.py entry=board/2026-11-30-mine      the same; the same command resumes

An entry is a folder: see docs/board.md. Its seeds and texts are drawn from the commit that changed it last; `commit=`
names another, as the check of a pull request does. An entry that was judged as it is now is not judged again; only the
page is written anew, from all verdicts beside it.
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    import start as start  # runs this program

import subprocess
from pathlib import Path

from conf.schema import ConfigError, Section
from lab.board import board, page, rules
from ropewalk.app.cli import program, quoted
from ropewalk.files import write_json, write_text


class Arguments(Section):
    entry: str
    commit: str | None
    page: str
    runs_dir: str
    track: list[str]


@program(Arguments)
def main(args: Arguments) -> None:
    entry = board.load(Path(args.entry))
    folder = entry.folder
    judged = {verdict.entry: verdict for verdict in board.verdicts(folder.parent)}.get(folder.name)
    if judged is None or judged.source != entry.source or args.commit not in (None, judged.commit):
        options = [*args.track, f"runs_dir={quoted(args.runs_dir)}"]
        verdict = board.judged(entry, args.commit or commit_of(folder), options)
        write_json(folder / "verdict.json", verdict.model_dump())
    # Read once more: others may have been judged meanwhile.
    rows = rules.standings(board.verdicts(folder.parent))
    figure = Path(args.page).with_suffix(".svg")
    page.draw(rows, figure)
    write_text(Path(args.page), page.markdown(rows, figure.name))
    print(*(page.line(row) for row in rows if row.verdict.entry == folder.name))


def commit_of(folder: Path) -> str:
    """The commit that changed an entry last. Raises ConfigError: there is none, or files have changed since."""
    said = []
    for command in (["status", "--porcelain"], ["log", "-1", "--format=%H"]):
        git = ["git", *command, "--", "pe.yaml", "encoding.py"]
        said.append(subprocess.run(git, cwd=folder, capture_output=True, text=True, check=False).stdout.strip())
    changed, commit = said
    if changed or not commit:
        raise ConfigError(f"commit {folder} first: its seeds and texts are drawn from the commit")
    return commit
