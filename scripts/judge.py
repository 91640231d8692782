"""Judge an encoding against another: train what is missing, paired by seed, and end with one line.

python scripts/judge.py pe=mine                                  on data=markov, minutes on a CPU
python scripts/judge.py pe=mine pe.horizon=32 experiment=compare     on source code
python scripts/judge.py pe=yarn pe.scale=8 against=rerope seeds=5 data=text data.files='corpus/**/*.py'
python scripts/judge.py entry=board/2026-11-30-mine              the encoding of an entry of the board

Other keys are those of train.py and apply to both sides, except pe.*. The same command resumes. The verdict is
in RUNS_DIR/verdicts/ as JSON. Each verdict of a folder is a try and makes the intervals of later ones wider: see
lab/board/judge.py. Exit code: 0 better, 3 not separated, 4 worse; others as of train.py.
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.judge")

from lab.board.tries import Arguments, judged


def main(args: Arguments) -> None:
    raise SystemExit(judged(args))
