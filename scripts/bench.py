"""Measure speed and memory, each thing beside what it is compared with, and print a Markdown table.

python scripts/bench.py mode=attention "encodings=[rope,cope]" "lengths=[2048,4096]"
python scripts/bench.py mode=training "encodings=[rope,cope]" trainer.batch_size=32
python scripts/bench.py mode=peers nanogpt=FOLDER
"""

import os
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from benchmarks.attention import attention
from benchmarks.measure import markdown
from benchmarks.training import peers, training
from conf.cli import program
from conf.run_dir import provenance
from conf.schema import Count, Section
from training.hardware import Hardware


class Options(Section):  # conf/bench.yaml explains them
    mode: Literal["attention", "training", "peers"]
    rounds: int = Field(ge=2)
    threads: int = Field(ge=0)
    device: Literal["auto", "cpu", "cuda", "mps"]
    encodings: list[str | dict[str, Any]] | None
    lengths: list[Count] = Field(min_length=1)
    n_head: Count
    head_dim: Count
    dtype: Literal["float32", "bfloat16"]
    steps: Count
    train_len: Count
    nanogpt: str | None
    shapes: list[Annotated[list[Count], Field(min_length=5, max_length=5)]]
    model: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any]


@program("bench", Options)
def main(options: Options) -> None:
    options.device = Hardware.resolve(accelerator=options.device, precision=32).device  # type: ignore[assignment]
    if options.threads:
        torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    rows = {"attention": attention, "training": training, "peers": peers}[options.mode](options)
    about = provenance()
    print(
        f"`{about['command']}`, {about['time']}; {about['processor']}, {torch.get_num_threads()} threads, "
        f"{options.device}; torch {about['torch']}; commit {about['commit']}; load before {load:.1f}. "
        f"Medians of {options.rounds} rounds (quartiles).\n\n{markdown(rows)}"
    )


if __name__ == "__main__":
    main()
