"""Measure what the project claims to be fast, each thing beside what it is compared with.

python scripts/bench.py attention pe=rope,cope lengths=1024,2048,4096 threads=1
python scripts/bench.py training pe=rope,cope rounds=9
python scripts/bench.py data
python scripts/bench.py startup
python scripts/bench.py peers nanogpt=FOLDER model.n_layer=6 model.n_head=6 model.dim=384

Prints Markdown; out=FILE.json also writes every measurement. The keys of a mode are those of the class `Arguments` in
its module in benchmarks/, and those of train.py where it trains.
"""

import sys
from functools import partial
from importlib import import_module

import conf.cli
from benchmarks.report import check_out, publish, where
from conf.schema import ConfigError, nearest

MODES = ("attention", "training", "data", "startup", "peers")


def main(mode: str, command: str, arguments: dict[str, str]) -> None:
    if mode not in MODES:
        raise ConfigError(f"mode {mode!r}: there is no such mode" + nearest(mode, MODES))
    module = import_module(f"benchmarks.{mode}")
    request = module.read(arguments)
    check_out(request.args.out)
    place = where(request.device, request.args.threads) | {"command": command}
    publish(mode, module.measure(request), place, request.args.out)


if __name__ == "__main__":
    command = " ".join(sys.argv)
    mode = sys.argv.pop(1) if len(sys.argv) > 1 and "=" not in sys.argv[1] else ""
    conf.cli.script(partial(main, mode, command))
