"""Evaluate a finished run anew, at other lengths or on more text.

python scripts/evaluate.py run=runs/yarn-code eval.lengths=[1,2,4,8,16] eval.sequences=128

Rewrites the run's results.json and figures; the keys are those of the `eval` section.
"""

import yaml

import conf.cli
import data as data_sources
from conf.rundir import RunDir, check_identity, find, read_config
from conf.schema import ConfigError, check, nearest
from evaluation.results import Results
from model import store
from train import draw, evaluate, report


def main(arguments: dict[str, str]) -> None:
    if "run" not in arguments:
        raise ConfigError("run=... is missing: the run directory to evaluate")
    path = find(arguments.pop("run"))
    values = read_config(path) | {"runs_dir": str(path.parent), "name": path.name}
    for key, value in arguments.items():
        section, _, option = key.partition(".")
        if section != "eval" or option not in values["eval"]:
            raise ConfigError(f"{key}: there is no such key" + nearest(key, [f"eval.{k}" for k in values["eval"]]))
        values["eval"][option] = yaml.safe_load(value)
    cfg = check(values)
    run = RunDir(cfg)
    trained = Results.load(run.results) if run.results.is_file() else None
    net = store.load(path)
    data = data_sources.build(cfg.data)
    data.prepare(progress=True)
    check_identity(path, data.identity())
    results = evaluate(net, data, cfg, progress=print)
    results.training = trained.training if trained else None
    results.save(run.results)
    draw(results, run)
    report(results)


if __name__ == "__main__":
    conf.cli.script(main)
