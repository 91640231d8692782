"""Check a GPU that nothing has run on yet: print Markdown on whether it is exact, how fast it is and what it holds.

The check is that of trainer.kernels: outputs and all gradients in bf16 beside float64, by kernels where there are any,
each encoding in a process of its own. After about two minutes a line says whether kernels are usable. The last line is
the verdict. What time did not allow is named. Exit code 1: something is not exact, or failed, or was left out.

python scripts/check_gpu.py > gpu.md
python scripts/check_gpu.py "encodings=[kerple,fox]" minutes=3 > gpu.md
TRITON_INTERPRET=1 python scripts/check_gpu.py device=cpu "encodings=[t5]" "lengths=[128]"    # runs anywhere
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.check_gpu")

from lab.benchmarks import Options as Arguments
from lab.benchmarks.exactness import check


def main(args: Arguments) -> None:
    raise SystemExit(check(args))
