"""Measure a trained run anew: at other lengths, on more text, for passkeys, or read by other encodings.

python scripts/evaluate.py run=runs/yarn-code 'eval.lengths=[1,2,4,8,16]' eval.sequences=512
python scripts/evaluate.py run=runs/rope-code pe=yarn pe.scale=8 pe.beta_fast=2
python scripts/evaluate.py run=runs/rope-code 'eval.variants=[linear,ntk,{pe: yarn, scale: 8}]'
python scripts/evaluate.py run=runs/rope-code 'measures=[lengths,passkeys]'
python scripts/evaluate.py -m run=runs/rope-code,runs/alibi-code 'measures=[passkeys]'

Keys of `eval` that are not given are those of the run. Zero-shot encodings train nothing: they read the same weights,
with the run's own options where both have them, such as the base. The results are added to the run's evals/, in place
of those with the same settings, and report.html is made anew.
"""

import hydra
from omegaconf import DictConfig

import data as data_sources
from conf import init_from
from conf.cli import friendly_errors, plain
from conf.run_dir import check_identity, data_options, lock, provenance
from evaluation import lengths, page, results, terminal
from model import serialization
from model.files import read_json
from training.hardware import Hardware, tune_cpu


@friendly_errors
@hydra.main(version_base="1.3", config_path="../conf", config_name="evaluate")
def main(composed: DictConfig) -> None:
    asked = plain(composed)
    path, cfg, chosen = init_from.evaluation(composed)
    precision = asked["precision"] or cfg.trainer.precision
    hardware = Hardware.resolve(accelerator=asked["device"], precision=precision)
    data = data_sources.build(data_options(path, asked["cache_dir"]))
    if asked["measures"] == ["passkeys"]:  # they need the tokenizer alone
        check_identity(path, data.tokenizer_identity())
    else:
        data.prepare(progress=True)
        check_identity(path, data.identity())
    measures = lengths.plans(data, cfg, asked["measures"], asked["passkeys"])
    if hardware.device == "cpu":
        tune_cpu()
    net = serialization.load(path).to(hardware.device)
    with lock(path):
        about = lengths.About(
            run=path.name,
            run_id=read_json(path / "environment.json")["run_id"],
            step=cfg.trainer.max_steps,
            provenance=provenance(device=hardware.device, precision=hardware.precision),
        )
        # beside encodings that are asked for, what is known of the run's own is not measured again
        beside = chosen is not None or asked["eval"]["variants"] is not None
        own = [e for e in results.load_all(path) if not e.variant.zero_shot] if beside else []
        found = lengths.evaluate(
            net, data, cfg, about=about, measures=measures, variants=chosen, existing=own, autocast=hardware.autocast,
            progress=True,
        )  # fmt: skip
        for evaluation in found:
            evaluation.save(path / "evals")
        written = page.write_beside(path)
    terminal.show(path, cfg, found)
    print(f"to look at: {written}")


if __name__ == "__main__":
    main()
