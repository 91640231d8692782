"""Measure speed and memory, each thing beside what it is compared with, and print a Markdown table.

python scripts/bench.py mode=attention "encodings=[rope,cope]" "lengths=[2048,4096]"
python scripts/bench.py mode=rotation "lengths=[256,2048]"
python scripts/bench.py mode=training "encodings=[nope,alibi,cope]" train_len=512 steps=3
python scripts/bench.py mode=exactness head_dim=128     # exit code 1: an encoding is not exact, or its check failed
TRITON_INTERPRET=1 python scripts/bench.py mode=exactness device=cpu "encodings=[t5]"    # runs anywhere
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.bench")

from lab.benchmarks import Options
from lab.benchmarks.attention import attention
from lab.benchmarks.exactness import exactness
from lab.benchmarks.measure import begun, markdown
from lab.benchmarks.rotation import rotations
from lab.benchmarks.training import training
from ropewalk.app.cli import program

MODES = {"attention": attention, "exactness": exactness, "rotation": rotations, "training": training}


@program(Options)
def main(options: Options) -> None:
    for line in markdown(MODES[options.mode](begun(options))):
        print(line, flush=True)
