"""Evaluate a trained run again: at other lengths, on more text, with RULER, or read with other encodings.

python scripts/evaluate.py run=runs/rope-code 'eval.lengths=[1,2,4,8,16]' eval.sequences=512
python scripts/evaluate.py run=runs/rope-code pe=yarn pe.beta_fast=2
python scripts/evaluate.py run=runs/rope-code 'measures=[ruler]' 'ruler.tasks=[niah_single,vt]' 'eval.lengths=[4,8]'
python scripts/evaluate.py run=hf:FOLDER_OR_HUB_ID 'eval.lengths=[1,2]'
python scripts/evaluate.py -m run=runs/rope-code,runs/alibi-code 'measures=[lengths,ruler]' 'eval.lengths=[4,8]'

Keys of `eval` that are not given are those of the run. Zero-shot encodings read the same weights, with the run's own
options where both have them. Results are added to evals/; those with the same settings are replaced. Other text is a
run of its own, of 0 steps: python train.py init_from=RUN trainer.max_steps=0 data=text data.files=GLOB
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.evaluate")

from typing import Any, Literal

import torch

from conf.schema import Count, Precision, Section
from ropewalk.app import configure, init_from
from ropewalk.evaluation import results
from ropewalk.evaluation.evaluator import Evaluator
from ropewalk.evaluation.measures.base import Measure, build
from ropewalk.report import page
from ropewalk.run.directory import RunDir, check_identity, lock
from ropewalk.training import distributed
from ropewalk.training.hardware import Hardware, tune


class Arguments(Section):
    run: str
    step: Count | None
    pe: dict[str, Any] | None = None
    eval: dict[str, Any]
    measures: list[Literal["lengths", "by_position", "far_copies", "ruler", "reach"] | dict[str, Any]] | None
    ruler: dict[str, Any]  # options of the measure of this name, as those of reach
    reach: dict[str, Any]
    device: str
    precision: Precision | None
    cache_dir: str


def main(args: Arguments) -> None:
    path = init_from.directory(args.run, args.cache_dir)
    # Locked until the end, so that nobody trains the run further between what is read here and what is written.
    with lock(path):
        trained = init_from.opened(path, args.cache_dir, args.step)
        cfg = configure.evaluation(path, trained.description, args.pe, args.eval)
        # What was trained with kernels is read with them where they run.
        hardware = Hardware.resolve(
            accelerator=args.device, precision=args.precision or cfg.trainer.precision,
            kernels="auto" if cfg.trainer.kernels else False,
        )  # fmt: skip
        tune(hardware.device)
        dtype = torch.bfloat16 if hardware.precision == "bf16-true" else torch.float32
        net = trained.network().to(hardware.device, dtype)
        distributed.install_kernels(net.encodings, hardware)
        trained.data.prepare()
        check_identity(path, trained.data.identity())
        # None: what `cfg.eval` asks for.
        asked = None if args.measures is None else [measure_of(args, measure) for measure in args.measures]
        # If other encodings are asked for, results of the trained encoding are not measured again, unless they are of
        # another precision: what is compared is measured alike.
        known = []
        if args.pe or args.eval["variants"] is not None:
            for result in results.load_all(path):
                if not result.variant.zero_shot and result.provenance.get("precision") == hardware.precision:
                    known.append(result)
        step = cfg.trainer.max_steps if trained.step is None else trained.step
        measured = Evaluator(net, trained.data, cfg, hardware).measure(RunDir(cfg), step, asked, known)
        report = page.write_beside(path)
    page.show(path, cfg, measured)
    print(f"to look at: {report}")


def measure_of(args: Arguments, asked: str | dict[str, Any]) -> str | Measure:
    """What `Evaluator.measure` takes for one entry of `measures`."""
    if isinstance(asked, dict):  # a class, with its options
        return build(asked)
    # The lab's have a section of their name in `Arguments`; the core's are named.
    return build(getattr(args, asked), asked) if asked in ("ruler", "reach") else asked
