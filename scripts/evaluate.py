"""Measure a trained run anew: at other lengths, on more text, for passkeys, or read by other encodings.

python scripts/evaluate.py run=runs/yarn-code 'eval.lengths=[1,2,4,8,16]' eval.sequences=512
python scripts/evaluate.py run=runs/rope-code pe=yarn pe.scale=8 pe.beta_fast=2
python scripts/evaluate.py run=runs/rope-code 'eval.variants=[linear,ntk,{pe: yarn, scale: 8}]'
python scripts/evaluate.py run=runs/rope-code 'measures=[lengths,passkeys]'
python scripts/evaluate.py run=hf:FOLDER_OR_HUB_ID 'eval.lengths=[1,2]'
python scripts/evaluate.py -m run=runs/rope-code,runs/alibi-code 'measures=[passkeys]'

Keys of `eval` that are not given are those of the run. Zero-shot encodings train nothing: they read the same weights,
with the run's own options where both have them, such as the base. The results are added to the run's evals/, in place
of those with the same settings, and report.html is made anew.
"""

import torch
from omegaconf import DictConfig
from pydantic import Field

import ropewalk
from conf import init_from
from conf.cli import program
from conf.compose import plain
from conf.run_dir import check_identity, lock
from conf.schema import Section, parse
from evaluation import lengths, page, results
from training.hardware import Hardware, tune_cpu
from training.provenance import provenance


class Passkeys(Section):
    depths: int = Field(ge=2, le=2**31)
    trials: int = Field(ge=2, le=2**31)
    seed: int = Field(ge=0, lt=2**63)


class Arguments(Section):
    """The keys beside `eval` and `pe`."""

    run: str
    measures: list[str] | None
    passkeys: Passkeys
    device: str
    precision: str | int | None
    cache_dir: str


@program("evaluate")
def main(composed: DictConfig) -> None:
    asked = plain(composed)
    args = parse(Arguments, {key: value for key, value in asked.items() if key not in ("eval", "pe")})
    path, run_id, cfg = init_from.evaluation(composed)
    hardware = Hardware.resolve(accelerator=args.device, precision=args.precision or cfg.trainer.precision)
    if hardware.device == "cpu":
        tune_cpu()
    model = ropewalk.load(path, device=hardware.device, cache_dir=args.cache_dir)
    model.net.to(torch.bfloat16 if hardware.precision == "bf16-true" else torch.float32)
    if args.measures != ["passkeys"]:  # which need the tokenizer alone
        model.data.prepare(progress=True)
        check_identity(path, model.data.identity())
    measures = lengths.plans(model.data, cfg, args.measures, args.passkeys.model_dump())
    with lock(path, run_id):
        made = provenance(device=hardware.device, precision=hardware.precision)
        about = {"run": path.name, "run_id": run_id, "step": cfg.trainer.max_steps, "provenance": made}
        # beside encodings that are asked for, what is known of the run's own is not measured again
        beside = "pe" in asked or asked["eval"]["variants"] is not None
        own = [e for e in results.load_all(path) if not e.variant.zero_shot] if beside else []
        found = lengths.evaluate(
            model.net, model.data, cfg, about=about, measures=measures, existing=own, autocast=hardware.autocast,
            progress=True,
        )  # fmt: skip
        for evaluation in found:
            evaluation.save(path / "evals")
        written = page.write_beside(path)
    page.show(path, cfg, found)
    print(f"to look at: {written}")


if __name__ == "__main__":
    main()
