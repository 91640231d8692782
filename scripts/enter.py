"""Enter an encoding into the board: train what is missing, and end with one line.

make board PE=board/2026-11-30-mine
python scripts/enter.py entry=board/2026-11-30-mine      the same; the same command resumes

An entry is a folder: see docs/board.md. Its seeds and texts are drawn from the commit that changed it last; `commit=`
names another, as the check of a pull request does. An entry that was judged as it is now is not judged again; only the
page is written anew, from all verdicts beside it.
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.enter")

from lab.board.board import Arguments, enter


def main(args: Arguments) -> None:
    enter(args)
