"""The board: folders of entries, what is measured of them, and the verdict on one.

Every entry is trained in the same small network on texts with a Markov chain each, and reads texts of eight times that
length. There are two kinds of chains: one that stays the same, so that everything said before counts, and one that is
drawn anew now and then, so that what was said last counts. An encoding that is good at one alone scores little.
"""

import hashlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from conf.schema import Config, ConfigError, Section, parse
from data.base import build_data
from lab.board import rules
from lab.board.rules import Measured, Verdict
from lab.board.trials import configuration, losses, runs_of, train_all
from model.gpt import GPT
from model.position.network import max_len_of
from model.size import n_parameters
from ropewalk.app.cli import encoding
from ropewalk.app.run_dir import read_file
from ropewalk.files import read_yaml
from ropewalk.training.provenance import provenance

SWITCHES = (0.0, 0.01)  # of the two kinds of chains: data.switch
LR = 3e-3  # of an entry that chooses none
STEPS = 10  # that are timed; the fastest counts


class Own(Section):
    """What pe.yaml may say besides the encoding."""

    lr: float = LR
    help: dict[str, Any] = Field(default_factory=dict)


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
    for file in ("README.md", "pe.yaml"):
        if not (folder / file).is_file():
            raise ConfigError(f"{folder} has no {file}: docs/board.md says what an entry needs")
    where = f"{folder}/pe.yaml: "
    values = read_yaml(folder / "pe.yaml")
    if not isinstance(values, dict):
        raise ConfigError(f"{where}it has no options")
    own = parse(Own, {key: values.pop(key) for key in values.keys() & Own.model_fields.keys()}, where)
    pe = encoding(values, f"{where}pe")
    code = folder / "encoding.py"
    source = (folder / "pe.yaml").read_bytes() + (code.read_bytes() if code.is_file() else b"")
    return Entry(folder, pe, own.lr, own.help, hashlib.sha256(source).hexdigest()[:16])


def verdicts(board: Path) -> list[Verdict]:
    """The verdicts on all entries of a board. Raises ConfigError: one is damaged."""
    remedy = "remove it, and make it again"
    return [read_file(path, Verdict, remedy) for path in sorted(board.glob("*/verdict.json"))]


def judged(entry: Entry, commit: str, options: Sequence[str]) -> Verdict:
    """Train an entry and the holder of the record with seeds drawn from the commit, with more if it is promising.

    Args:
        options: of train.py that hold for every entry, as trainer.accelerator=cpu.
    """
    board = entry.folder.parent
    others = [verdict for verdict in verdicts(board) if verdict.entry != entry.folder.name]
    holder = rules.holder_of(rules.standings(others))
    entries = [entry, load(board / holder)] if holder else [entry]
    sides = [configured(e, options) for e in entries]
    parameters, cost = size_and_cost(sides[0], configured(entry, options, pe="rope"))
    seeds = rules.drawn_seeds(commit)
    found = measured(sides, seeds[: rules.FEW])
    if holder and rules.is_promising(*found):
        print("promising: more seeds decide whether it is a record", flush=True)
        found = measured(sides, seeds)
    return Verdict(
        entry=entry.folder.name, number=max((v.number for v in others), default=0) + 1,
        encoding=str(entry.pe["name"]), source=entry.source, commit=commit,
        seeds=seeds[: len(found[0].gain[0])], lr=entry.lr, help=entry.help, parameters=parameters, cost=cost,
        measured=found[0], holder=holder, measured_of_holder=found[1] if holder else None, made_by=provenance(),
    )  # fmt: skip


def configured(entry: Entry, options: Sequence[str], pe: str | None = None) -> Config:
    """The configuration of an entry's runs, or that of another encoding in its place."""
    network = [f"model.{key}={value}" for key, value in entry.help.items()]
    texts = "data._target_=lab.board.texts.DrawnTexts"
    chosen = encoding(pe) if pe else entry.pe
    return configuration("data=markov", texts, *options, *network, f"optim.lr={entry.lr}", pe=chosen)


def measured(sides: Sequence[Config], seeds: Sequence[int]) -> list[Measured]:
    """What each of the sides measures with these seeds; trains what is missing."""
    of_sides = [of_kinds(side, seeds) for side in sides]
    train_all(itertools.chain(*itertools.chain(*of_sides)))
    result = []
    for of_side in of_sides:
        bits = np.array([[_bits(run) for run in of_kind] for of_kind in of_side])
        if not np.isfinite(bits).all():
            name = of_side[0][0].pe["name"]
            raise ConfigError(f"pe={name} ends in NaN or infinity: an entry needs a loss at both lengths")
        gain, possible, excess = np.moveaxis(bits, -1, 0).round(6).tolist()
        result.append(Measured(gain=gain, possible=possible, excess=excess))
    return result


def of_kinds(cfg: Config, seeds: Sequence[int]) -> list[list[Config]]:
    """The runs of an entry by kind of chains and seed; each seed has texts of its own."""
    result = []
    for switch in SWITCHES:
        changes = [{"seed": seed, "data": cfg.data | {"switch": switch, "texts": seed}} for seed in seeds]
        result.append(runs_of(cfg, changes))
    return result


def _bits(run: Config) -> tuple[float, float, float]:
    """Of a complete run, in bits per token: gain over the cut text, possible gain, and loss above the best possible."""
    rows = losses(run)
    ends = [rows[run.train_len], rows[max(run.lengths)]]
    cut, whole = (row.sample.values.sum() / row.sample.units.sum() for row in ends)
    best_of_cut, best = (row.optimum.values.sum() / row.optimum.units.sum() for row in ends if row.optimum)
    return float(cut - whole), float(best_of_cut - best), float(cut - best_of_cut)


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
