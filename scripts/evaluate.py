"""Evaluate a trained run again: at other lengths, on more text, with RULER, or read with other encodings.

python scripts/evaluate.py run=runs/rope-code 'eval.lengths=[1,2,4,8,16]' eval.sequences=512
python scripts/evaluate.py run=runs/rope-code pe=yarn pe.scale=8 pe.beta_fast=2
python scripts/evaluate.py run=runs/rope-code 'measures=[ruler]' 'ruler.tasks=[niah_single,vt]' 'eval.lengths=[4,8]'
python scripts/evaluate.py run=runs/fox 'measures=[key_tokens]' key_tokens.judge=runs/rope key_tokens.pe=rerope
python scripts/evaluate.py run=hf:FOLDER_OR_HUB_ID 'eval.lengths=[1,2]'
python scripts/evaluate.py -m run=runs/rope-code,runs/alibi-code 'measures=[lengths,ruler]' 'eval.lengths=[4,8]'

Keys of `eval` that are not given are those of the run. Zero-shot encodings read the same weights, with the run's own
options where both have them. Results are added to evals/; those with the same settings are replaced. Other text is a
run of its own, of 0 steps: python train.py init_from=RUN trainer.max_steps=0 data=text data.files=GLOB
"""

from typing import Any, Literal

import torch
from pydantic import Field

import ropewalk
from conf.schema import ConfigError, Precision, Section
from data.base import hash_texts
from lab.measures.key_tokens import Judge
from lab.measures.ruler_questions import TASKS
from ropewalk.app import init_from
from ropewalk.app.cli import program
from ropewalk.app.run_dir import check_identity, find, load_config, lock, read_environment
from ropewalk.evaluation import results
from ropewalk.evaluation.measures import lengths
from ropewalk.evaluation.results import Kind
from ropewalk.report import page, terminal
from ropewalk.training import distributed
from ropewalk.training.hardware import Hardware, tune


class Ruler(Section):
    tasks: list[Literal[tuple(TASKS)]] = Field(min_length=1)  # type: ignore[valid-type]
    depths: int = Field(ge=2, le=2**31)
    trials: int = Field(ge=2, le=2**31)
    seed: int = Field(ge=0, lt=2**63)


class KeyTokens(Section):
    judge: str | None
    pe: str | dict[str, Any] | None
    threshold: float = Field(gt=0, allow_inf_nan=False)


class Arguments(Section):
    run: str
    pe: dict[str, Any] | None = None
    eval: dict[str, Any]
    measures: list[Kind] | None
    ruler: Ruler
    key_tokens: KeyTokens
    device: str
    precision: Precision | None
    cache_dir: str


@program("evaluate", Arguments)
def main(args: Arguments) -> None:
    path = init_from.opened(args.run, args.cache_dir)
    # Locked until the end, so that nobody trains the run further between what is read here and what is written.
    with lock(path):
        cfg = init_from.evaluation(path, args.pe)
        # What was trained with kernels is read with them where they run.
        hardware = Hardware.resolve(
            accelerator=args.device, precision=args.precision or cfg.trainer.precision,
            kernels="auto" if cfg.trainer.kernels else False,
        )  # fmt: skip
        tune(hardware.device)
        model = ropewalk.load(path, device=hardware.device, cache_dir=args.cache_dir)
        model.net.to(torch.bfloat16 if hardware.precision == "bf16-true" else torch.float32)
        distributed.install_kernels(model.net.encodings, hardware)
        model.data.prepare(progress=True)
        check_identity(path, model.data.identity())
        judge = None
        if args.key_tokens.judge:
            judge = judge_of(args.key_tokens.judge, args.key_tokens, model)
        measures = lengths.plans(model.data, cfg, args.measures, args.ruler.model_dump(), judge)
        # If other encodings are asked for, results of the trained encoding are not measured again.
        known = []
        if args.pe or args.eval["variants"] is not None:
            known = [result for result in results.load_all(path) if not result.variant.zero_shot]
        measured = lengths.measure(
            model.net, model.data, cfg, hardware, path,
            run_id=read_environment(path).run_id, step=cfg.trainer.max_steps, measures=measures, existing=known,
        )  # fmt: skip
        report = page.write_beside(path)
    terminal.show(path, cfg, measured)
    print(f"to look at: {report}")


def judge_of(run: str, options: KeyTokens, model: ropewalk.Model) -> Judge:
    """Return the model in `run` that chooses the key tokens in the texts of `model`.

    Raises ValueError: there is no such run, it has other tokens, or its weights cannot be read like that.
    """
    reader = {"pe": options.pe} if isinstance(options.pe, str) else options.pe or {}
    judge = ropewalk.load(run, device=str(model.net.embedding.weight.device), **reader)
    if judge.data.tokenizer_identity() != model.data.tokenizer_identity():
        raise ConfigError(f"key_tokens.judge={run} was trained with another tokenizer: take one of these data")
    path = find(run)
    identity = hash_texts(read_environment(path).run_id, load_config(path).trainer.max_steps, reader)
    return Judge(judge.net, identity, options.threshold)


if __name__ == "__main__":
    main()
