"""Measure speed and memory, each thing beside what it is compared with, and print a Markdown table.

python scripts/bench.py mode=attention "encodings=[rope,cope]" "lengths=[2048,4096]"
python scripts/bench.py mode=training "encodings=[nope,alibi,cope]" train_len=512 steps=3
python scripts/bench.py mode=peers nanogpt=../nanoGPT model.n_layer=6 model.dim=384
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.bench")

from typing import Literal

from lab.benchmarks import Options
from lab.benchmarks.attention import attention
from lab.benchmarks.measure import begun, markdown
from lab.benchmarks.peers import peers
from lab.benchmarks.training import training

MODES = {"attention": attention, "training": training, "peers": peers}


class Arguments(Options):
    mode: Literal["attention", "training", "peers"]


def main(args: Arguments) -> None:
    for line in markdown(MODES[args.mode](begun(args))):
        print(line, flush=True)
