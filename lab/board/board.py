"""The board: folders of entries, what is measured of them, and the verdict on one.

Every entry is trained in the same small network on texts with a Markov chain each, and reads texts of eight times that
length. There are two kinds of chains: one that stays the same, so that everything said before counts, and one that is
drawn anew now and then, so that what was said last counts. An encoding that is good at one alone scores little.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from conf.schema import Config, ConfigError, parse
from data.base import build_data
from lab.board import judge, rules
from lab.board.rules import Measured, Verdict
from lab.board.side_by_side import train_all
from lab.board.tries import contestants
from model.gpt import GPT
from model.position.network import max_len_of
from model.size import n_parameters
from ropewalk.app.cli import encoding
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import for_this_machine, resolve, with_variants
from ropewalk.evaluation.statistics import Sample
from ropewalk.files import read_json, read_yaml
from ropewalk.training.provenance import provenance

SWITCHES = (0.0, 0.01)  # of the two kinds of chains: data.switch
LR = 3e-3  # of an entry that chooses none
STEPS = 10  # that are timed; the fastest counts


class Entry(NamedTuple):
    """What somebody entered."""

    folder: Path
    pe: dict[str, Any]  # all options of the encoding
    lr: float
    help: dict[str, Any]  # options of the network, as {"conv": 4}
    source: str  # hash of what decides the above


def load(folder: Path) -> Entry:
    """Read an entry: README.md, pe.yaml and, unless that names an encoding of conf/pe, encoding.py.

    pe.yaml is as a file of conf/pe, or {pe: NAME, OPTION: VALUE, ...}. It may have `lr`, and options of the network as
    `help`.

    Raises ConfigError: a file is missing or mistaken.
    """
    source = b""
    for file in ("README.md", "pe.yaml", "encoding.py"):
        path = folder / file
        if path.is_file():
            source += path.read_bytes() if file != "README.md" else b""
        elif file != "encoding.py":
            raise ConfigError(f"{folder} has no {file}: docs/board.md says what an entry needs")
    chosen = dict(read_yaml(folder / "pe.yaml"))
    lr = float(chosen.pop("lr", LR))
    network = chosen.pop("help", {})
    pe = encoding(chosen, f"{folder}/pe.yaml: pe")
    return Entry(folder, pe, lr, network, hashlib.sha256(source).hexdigest()[:16])


def verdicts(board: Path) -> Iterator[Verdict]:
    """The verdicts on all entries of a board, in the order of their dates. Raises ConfigError: one is damaged."""
    for path in sorted(board.glob("*/verdict.json")):
        try:
            yield parse(Verdict, read_json(path))
        except ValueError as error:
            raise ConfigError(f"{path} is damaged ({error}): remove it, and make it again") from None


def judged(entry: Entry, commit: str, options: Sequence[str]) -> Verdict:
    """Train an entry and the holder of the record with seeds drawn from the commit, with more if it is promising.

    Args:
        options: of train.py that hold for every entry, as trainer.accelerator=cpu.
    """
    board = entry.folder.parent
    earlier = rules.standings(verdict for verdict in verdicts(board) if verdict.entry < entry.folder.name)
    holder = rules.holder_of(earlier)
    sides = [entry, load(board / holder)] if holder else [entry]
    parameters, cost = size_and_cost(*configurations(entry, 0.0, options))
    seeds = rules.drawn_seeds(commit)
    found = measured(sides, seeds[: rules.FEW], options)
    if holder and rules.is_promising(*found):
        print("promising: more seeds decide whether it is a record", flush=True)
        found = measured(sides, seeds, options)
    return Verdict(
        entry=entry.folder.name, encoding=str(entry.pe["name"]), source=entry.source, commit=commit,
        seeds=seeds[: len(found[0].gain[0])], lr=entry.lr, help=entry.help, parameters=parameters, cost=cost,
        measured=found[0], holder=holder, measured_of_holder=found[1] if holder else None, made_by=provenance(),
    )  # fmt: skip


def configurations(entry: Entry, switch: float, options: Sequence[str]) -> tuple[Config, Config]:
    """The run of an entry on one kind of chains, and that of RoPE in its place."""
    network = [f"model.{key}={value}" for key, value in entry.help.items()]
    values = train_values("data=markov", *options, *network, f"data.switch={switch}", f"optim.lr={entry.lr}")
    values["data"]["_target_"] = "lab.board.texts.DrawnTexts"
    mine = for_this_machine(resolve(values | {"pe": entry.pe}))
    rope = for_this_machine(resolve(values | {"pe": encoding("rope")}))
    return mine, rope


def measured(sides: Sequence[Entry], seeds: Sequence[int], options: Sequence[str]) -> list[Measured]:
    """What each of the sides measures with these seeds; trains what is missing."""
    of_sides = [runs_of(side, seeds, options) for side in sides]
    runs: dict[str, Config] = {}
    for cfg in itertools.chain(*itertools.chain(*of_sides)):
        # Sides that read the same weights share a run, which measures both.
        sharing = [other for other in (runs.get(str(cfg.name)), cfg) if other]
        readings: list[Any] = [pe for other in sharing for pe in other.eval.variants or []]
        runs[str(cfg.name)] = with_variants(cfg, readings)
    train_all([*runs.values()])
    result = []
    for side, of_side in zip(sides, of_sides, strict=True):
        pe = configurations(side, 0.0, options)[0].pe
        bits = np.array([[_bits(runs[str(cfg.name)], pe) for cfg in of_kind] for of_kind in of_side])
        gain, possible, excess = np.moveaxis(bits, -1, 0).round(6).tolist()
        result.append(Measured(gain=gain, possible=possible, excess=excess))
    return result


def runs_of(entry: Entry, seeds: Sequence[int], options: Sequence[str]) -> list[list[Config]]:
    """The runs of an entry by kind of chains and seed; each seed has texts of its own."""
    result = []
    for switch in SWITCHES:
        both = configurations(entry, switch, options)
        of_kind = []
        for seed in seeds:
            mine, rope = (cfg.model_copy(update={"seed": seed, "data": cfg.data | {"texts": seed}}) for cfg in both)
            of_kind += contestants(mine, rope, 1)[0].runs
        result.append(of_kind)
    return result


def _bits(cfg: Config, pe: Mapping[str, Any]) -> tuple[float, float, float]:
    """Of a complete run, in bits per token: gain over the cut text, possible gain, and loss above the best possible."""

    def mean(sample: Sample) -> float:
        return float(sample.values.sum() / sample.units.sum())

    rows = judge.loss_rows(cfg, pe)
    cut, whole = rows[cfg.train_len], rows[max(cfg.lengths)]
    assert cut.optimum
    assert whole.optimum
    loss, best = mean(cut.sample), mean(cut.optimum)
    return loss - mean(whole.sample), best - mean(whole.optimum), loss - best


def size_and_cost(mine: Config, rope: Config) -> tuple[float, float]:
    """Parameters, and the time of a training step on this machine, as multiples of RoPE's.

    Both do steps in turns, in seconds of the processor, and the fastest counts: other work matters little.

    Raises ConfigError: the encoding is not defined at the longest length.
    """
    data = build_data(mine.data)
    x, y = data.train_batch(range(mine.trainer.batch_size), mine.train_len, seed=0)
    nets = [GPT(cfg.model, cfg.pe, vocab_size=data.vocab_size, train_len=cfg.train_len) for cfg in (mine, rope)]
    longest = max_len_of(nets[0].encodings)
    if longest and longest < max(mine.lengths):
        raise ConfigError(f"{mine.pe['name']} ends at {longest} tokens, and the score is that at {max(mine.lengths)}")

    torch.set_num_threads(1)  # as the entries are trained

    def step(net: GPT) -> float:
        started = time.process_time()
        net(x, targets=y).backward()
        return time.process_time() - started

    rounds = [[step(net) for net in nets] for _ in range(STEPS)]
    seconds = np.min(rounds, axis=0)
    sizes = [n_parameters(net)["total"] for net in nets]
    return round(sizes[0] / sizes[1], 4), round(float(seconds[0] / seconds[1]), 2)
