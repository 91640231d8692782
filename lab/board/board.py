"""The board: folders of entries, how one is entered, what is measured of it, and the verdict.

Every entry is trained in the same small network on texts with a Markov chain each, and reads texts of eight times that
length. There are two kinds of chains: one that stays the same, so that everything said before counts, and one that is
drawn anew now and then, so that what was said last counts. An encoding that is good at one alone scores little.
"""

import copy
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from conf import plugins
from conf.errors import ConfigError
from conf.files import read_yaml, write_json, write_text
from conf.options import encoding
from conf.schema import Config, Section, parse
from data.base import build_data
from lab.benchmarks.measure import interleave
from lab.board import counter, page, rules, trials
from lab.board.rules import Measured, Verdict
from lab.board.texts import SWITCHES
from model import serialization
from model.gpt import GPT
from model.position.network import Encodings, for_length, max_len_of
from model.size import n_parameters
from ropewalk.app.compose import quoted
from ropewalk.run.directory import RunDir, read_file
from ropewalk.run.provenance import git, provenance

TEXTS = ("data=markov", "data._target_=lab.board.texts.DrawnTexts")
STEPS = 10  # that are timed; the fastest counts


class Arguments(Section):
    entry: str
    commit: str | None
    page: str
    runs_dir: str
    track: list[str]


class Entry(Section):
    """What somebody entered."""

    folder: Path
    pe: dict[str, Any]  # all options of the encoding
    lr: float = 3e-3
    help: dict[str, Any] = Field(default_factory=dict)  # options of the network, as {"conv": 4}
    source: str  # hash of what decides the above


def load(folder: Path) -> Entry:
    """Read an entry: README.md, pe.yaml and, unless that names an encoding of conf/pe, encoding.py.

    pe.yaml is as a file of conf/pe, or {pe: NAME, OPTION: VALUE, ...}. It may have `lr`, and options of the network as
    `help`.

    Raises ConfigError: a file is missing or mistaken.
    """
    if not (folder / "README.md").is_file():
        raise ConfigError(f"{folder} has no README.md: docs/board.md says what an entry needs")
    where = f"{folder}/pe.yaml: "
    values = read_yaml(folder / "pe.yaml")
    if not isinstance(values, dict):
        raise ConfigError(f"{where}it has no options")
    code = folder / "encoding.py"
    plugins.allow(f"{folder.parent.name}.{folder.name}")  # whoever names an entry trusts its code
    source = (folder / "pe.yaml").read_bytes() + (code.read_bytes() if code.is_file() else b"")
    own = {"folder": folder, "source": hashlib.sha256(source).hexdigest()[:16]}
    for key in values.keys() & {"lr", "help"}:
        own[key] = values.pop(key)
    # What is left are the options of the encoding.
    return parse(Entry, own | {"pe": encoding(values, f"{where}pe")}, where)


def verdicts(board: Path) -> list[Verdict]:
    """The verdicts on all entries of a board. Raises ConfigError: one is damaged."""
    paths = sorted(board.glob("*/verdict.json"))
    return [read_file(path, Verdict, remedy="remove it, and make it again") for path in paths]


def enter(args: Arguments) -> None:
    """Judge an entry, unless it was judged as it is now; write the page anew, and print its line."""
    entry = load(Path(args.entry))
    folder = entry.folder
    others = {verdict.entry: verdict for verdict in verdicts(folder.parent)}
    # An entry that is judged again is not compared with itself.
    old = others.pop(folder.name, None)
    if old is None or old.source != entry.source or args.commit not in (None, old.commit):
        options = [*args.track, f"runs_dir={quoted(args.runs_dir)}"]
        verdict = judged(entry, others.values(), args.commit or commit_of(folder), options)
        write_json(folder / "verdict.json", verdict.model_dump())
    # Read once more: others may have been judged meanwhile.
    rows = rules.standings(verdicts(folder.parent))
    figure = Path(args.page).with_suffix(".svg")
    counted = counter.load(folder.parent)
    page.draw(rows, figure, counted)
    write_text(Path(args.page), page.markdown(rows, figure.name, counted))
    print(*(page.line(row) for row in rows if row.verdict.entry == folder.name))


def commit_of(folder: Path) -> str:
    """The commit that changed an entry last. Raises ConfigError: there is none, or files have changed since."""
    files = ("--", "pe.yaml", "encoding.py")
    commit = git("log", "-1", "--format=%H", *files, folder=folder).strip()
    if not commit or git("status", "--porcelain", *files, folder=folder):
        raise ConfigError(f"commit {folder} first: its seeds and texts are drawn from the commit")
    return commit


def judged(entry: Entry, others: Collection[Verdict], commit: str, options: Sequence[str]) -> Verdict:
    """Train an entry and the holder of the record with seeds drawn from the commit, with more if it is promising.

    Args:
        others: the verdicts on the entries beside it.
        options: of train.py that hold for every entry, as trainer.accelerator=cpu.
    """
    holder = rules.holder_of(rules.standings(others))
    entries = [entry, load(entry.folder.with_name(holder))] if holder else [entry]
    sides = [configured(e, options) for e in entries]
    parameters, cost, reading = size_and_costs(sides[0])
    seeds = rules.drawn_seeds(commit)
    # At 1x every entry is compared with the first one, whose mean needs to be sure.
    measured = measure_sides(sides, seeds[: rules.FEW] if holder else seeds)
    if holder and rules.is_promising(*measured):
        print("promising: more seeds decide whether it is a record", flush=True)
        measured = measure_sides(sides, seeds)
    return Verdict(
        entry=entry.folder.name, number=max((v.number for v in others), default=0) + 1,
        encoding=str(entry.pe["name"]), source=entry.source, commit=commit,
        seeds=seeds[: len(measured[0].gain[0])], lr=entry.lr, help=entry.help,
        parameters=parameters, cost=cost, reading=reading,
        measured=measured[0], holder=holder, measured_of_holder=measured[1] if holder else None, made_by=provenance(),
    )  # fmt: skip


def configured(entry: Entry, options: Sequence[str]) -> Config:
    """The configuration of an entry's runs."""
    network = [f"model.{key}={value}" for key, value in entry.help.items()]
    return trials.configuration(*TEXTS, *options, *network, f"optim.lr={entry.lr}", pe=entry.pe)


def measure_sides(sides: Sequence[Config], seeds: Sequence[int]) -> list[Measured]:
    """What each of the sides measures with these seeds. Raises ConfigError: a side diverged, or reads the future."""
    result = []
    losses = trials.train_and_measure([runs_of(side, seeds) for side in sides])
    for side, of_side in zip(sides, losses, strict=True):
        for cfg in runs_of(side, seeds[:1]):  # one of each kind of chains
            check_causal(serialization.load(RunDir(cfg).path), cfg)
        bits = np.array([_bits(rows) for rows in of_side]).reshape(len(SWITCHES), len(seeds), -1)
        if not np.isfinite(bits).all():
            raise ConfigError(f"pe={side.pe['name']} ends in NaN or infinity: an entry needs a loss at both lengths")
        gain, possible, excess = np.moveaxis(bits, -1, 0).round(6).tolist()
        result.append(Measured(gain=gain, possible=possible, excess=excess))
    return result


def runs_of(side: Config, seeds: Sequence[int]) -> list[Config]:
    """The runs of a side: for each kind of chains one with each seed, which has texts of its own."""
    return [
        trials.run_of(side, seed=seed, data=side.data | {"switch": switch, "texts": seed})
        for switch in SWITCHES
        for seed in seeds
    ]


def _bits(rows: trials.Losses) -> tuple[float, float, float]:
    """In bits per token: gain over the cut text, possible gain, and loss of the cut text above the best possible."""
    samples = [rows[length][key] for key in ("sample", "optimum_sample") for length in sorted(rows)]
    cut, whole, best_of_cut, best = (sample.values.sum() / sample.units.sum() for sample in samples)
    return float(cut - whole), float(best_of_cut - best), float(cut - best_of_cut)


def check_causal(net: GPT, cfg: Config) -> None:
    """Raise ConfigError if a later token changes what a network says of earlier ones, in training or evaluation."""
    net = net.double()
    n_tokens = net.vocab_size
    for length in (cfg.train_len, max(cfg.lengths)):
        encodings = for_length(net.encodings, length)
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(n_tokens, (2, length), generator=generator)
        for is_training in (True, False):
            net.train(is_training)
            for cut in (length // 2, length - 1):
                changed = x.clone()
                changed[:, cut:] = (changed[:, cut:] + 1) % n_tokens
                before = _logits(net, x, encodings)[:, :cut]
                after = _logits(net, changed, encodings)[:, :cut]
                if not torch.allclose(before, after, rtol=1e-9, atol=1e-9):
                    mode = "training" if is_training else "evaluation"
                    raise ConfigError(
                        f"pe={cfg.pe['name']} reads the future: in {mode}, at {length} tokens, what is said of the "
                        f"first {cut} tokens changes with the token after them"
                    )


@torch.no_grad()
def _logits(net: GPT, x: Tensor, encodings: Encodings) -> Tensor:
    torch.manual_seed(0)  # an encoding may draw numbers
    return net(x, encodings=encodings)


def size_and_costs(cfg: Config) -> tuple[float, float, float]:
    """Parameters and buffers, the time of a training step and that of reading the longest texts, beside RoPE's.

    Both networks do steps in turns, in seconds of the processor, and the fastest counts: other work matters little.

    Raises ConfigError: the encoding is not defined at the longest length, or reads the future.
    """
    data = build_data(cfg.data)
    x, y = data.train_batch(range(cfg.trainer.batch_size), cfg.train_len, seed=0)
    network = partial(GPT, cfg.model, vocab_size=data.vocab_size, train_len=cfg.train_len)
    mine = network(cfg.pe)
    rope = network(encoding("rope"))
    longest = max(cfg.lengths)
    limit = max_len_of(mine.encodings)
    if limit and limit < longest:
        raise ConfigError(f"{cfg.pe['name']} ends at {limit} tokens, and the score is that at {longest}")
    check_causal(copy.deepcopy(mine), cfg)

    def step(net: GPT) -> float:
        started = time.process_time()
        net(x, targets=y).backward()
        return time.process_time() - started

    long_x, _ = data.train_batch(range(8), longest, seed=0)

    @torch.no_grad()
    def read(net: GPT) -> float:
        started = time.process_time()
        net(long_x, encodings=for_length(net.encodings, longest))
        return time.process_time() - started

    # As the entries are trained.
    torch.set_num_threads(1)

    def cost(work: Callable[[GPT], float]) -> float:
        seconds, of_rope = map(min, interleave(partial(work, mine), partial(work, rope), STEPS))
        return round(seconds / of_rope, 2)

    return round(_size(mine) / _size(rope), 4), cost(step), cost(read)


def _size(net: GPT) -> int:
    """Parameters and buffers: numbers in a buffer may have been learned elsewhere."""
    return n_parameters(net)["total"] + sum(buffer.numel() for buffer in net.buffers())
