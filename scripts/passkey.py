"""Ask a trained model for keys that were told once in long texts, at several lengths and depths.

python scripts/passkey.py run=runs/rope-code lengths=[1,2,4,8] depths=5 trials=20
python scripts/passkey.py run=runs/rope-code pe=ntk,yarn pe.scale=8

Lengths are multiples of train_len. The first form asks the run itself, at each of its readings; the second reads the
same weights with other encodings too, as scripts/evaluate.py does. Writes passkey.json and figures/passkey.png, or
passkey_swap.json and figures/passkey_swap.png. What is scored: evaluation/retrieval.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import Field, Json
from rich.console import Console

import conf.cli
import data as data_sources
from conf.rundir import check_identity, find, read_config
from conf.schema import ConfigError, Section, parse
from conf.swap import swaps
from evaluation import retrieval
from evaluation.retrieval import Passkey
from model import store
from model.machine import Machine, tune_cpu

Ratio = Annotated[float, Field(gt=0)]


class Arguments(Section):
    run: str
    lengths: Json[list[Ratio]] = Field([1.0, 2.0, 4.0, 8.0], min_length=1)  # multiples of train_len
    depths: int = Field(5, ge=2)  # evenly from the start of the text to its end
    trials: int = Field(20, ge=2)  # for each length and depth
    seed: int = Field(0, ge=0)  # of the texts and keys


def main(arguments: dict[str, str]) -> None:
    other = {key: arguments.pop(key) for key in list(arguments) if key == "pe" or key.startswith("pe.")}
    args = parse(Arguments, arguments, strings=True)
    path = find(args.run)
    values = read_config(path)
    own = values["pe"]
    swapped = swaps(path, values, other)
    data = data_sources.build(values["data"])
    if data.task:
        raise ConfigError(
            f"{path} was trained on the task {data.task}, not on text: its errors are in its results.json"
        )
    check_identity(path, data.tokenizer_identity())
    device = Machine.choose(accelerator="auto", precision=32).device
    if device == "cpu":
        tune_cpu()
    train_len = store.describe(path)["train_len"]
    lengths = sorted({round(ratio * train_len) for ratio in args.lengths})
    results = Passkey(
        run=path.name, encoding=own["name"], data=values["data"]["name"], seed=args.seed, train_len=train_len,
        skipped={}, cells=[],
    )  # fmt: skip

    def ask(pe: dict[str, Any], readings: slice, label: Callable[[str], str]) -> None:
        found = retrieval.evaluate(
            store.load(path, pe=pe).to(device), data, lengths=lengths, depths=args.depths, trials=args.trials,
            seed=args.seed, readings=readings, label=label, progress=print,
        )  # fmt: skip
        results.cells.extend(found.cells)
        results.skipped.update(found.skipped)

    if swapped:
        others = [cfg.pe for cfg in swapped]
        ask(own, slice(None) if own in others else slice(1), lambda reading: f"{own['name']}, {reading}")
        for pe in others:
            if pe != own:
                ask(pe, slice(-1, None), partial(_label, pe["name"]))
    else:
        ask(own, slice(None), str)
    if not results.cells:
        raise ConfigError(f"lengths: nothing has a position at {lengths[0]} tokens: lower them")
    name = "passkey_swap" if swapped else "passkey"
    retrieval.heat_map(results, path / "figures" / f"{name}.png")
    results.save(path / f"{name}.json")
    Console().print(results.table())
    print(retrieval.NOTE)


def _label(name: str, reading: str) -> str:
    """What the reading of a swapped encoding is called: it was not trained like this."""
    return f"{name}, {reading}".removesuffix(", as trained")


if __name__ == "__main__":
    conf.cli.script(main)
