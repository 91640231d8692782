"""Preparing text beside tiktoken alone, and making batches beside the steps that consume them."""

import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import Field

import data as data_sources
from benchmarks import training
from benchmarks.measure import Clock, Kind, Pairs, take_turns
from benchmarks.report import Outcome, Table, progress
from conf.schema import Config, ConfigError, Section
from data.text import TextData

# What is sampled: text as train.py has it, and the tasks as their experiments have them.
SAMPLED = ("data=code", "experiment=flip_flop", "experiment=selective_copy", "experiment=counting", "experiment=recall")


class Arguments(Section):
    rounds: int = Field(5, ge=1)
    megabytes: float = Field(8.0, gt=0)  # of text that is prepared, at most
    steps: int = Field(5, ge=1)  # of a piece of training, whose time a batch is compared with
    batches: int = Field(50, ge=1)
    sampling: bool = True
    threads: int = Field(0, ge=0)  # 0: as PyTorch chooses
    clock: Kind = "wall"  # of the tables; JSON has both
    out: str | None = None  # JSON file


@dataclass(frozen=True)
class Request:
    args: Arguments
    device: str
    cfg: Config  # whose text is prepared
    sampled: dict[str, Config]


def read(arguments: dict[str, str]) -> Request:
    """Keys other than those of `Arguments` are train.py's. Raises ConfigError."""
    args = training.parse_own(Arguments, arguments)
    cfg = training.configure(arguments, args.rounds, args.steps)
    if not isinstance(data_sources.build(cfg.data), TextData):
        raise ConfigError(f"data={cfg.data['name']} is no text to prepare: tasks are sampled in any case")
    common = {key: value for key, value in arguments.items() if not key.startswith("data")}
    sampled = {"text": cfg}
    for choice in SAMPLED[1:] if args.sampling else ():
        key, _, name = choice.partition("=")
        sampled[name] = training.configure({key: name} | common, args.rounds, args.steps)
    return Request(args, training.machine_of(cfg).device, cfg, sampled)


class Documents:
    """Documents in memory, as `data.prepare` reads them, so that no disk is timed but the one written to."""

    def __init__(self, texts: list[bytes], fingerprint: str) -> None:
        self.texts, self.fingerprint = texts, fingerprint

    def ids(self) -> list[str]:
        return [str(i) for i in range(len(self.texts))]

    def documents(self, wanted: Any) -> Any:
        return (text for i, text in enumerate(self.texts) if wanted(str(i)))


def first(source: Any, size: float) -> list[bytes]:
    """Documents of a source that fit into `size` bytes, each once: preparation leaves out repetitions."""
    texts: dict[bytes, None] = {}
    total = 0
    for text in source.documents(lambda _: True):
        if text and text not in texts and total + len(text) <= size:
            texts[text] = None
            total += len(text)
        if total > 0.98 * size:
            break
    return list(texts)


def preparation(request: Request) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and measurements of preparing text beside tokenising it."""
    from data.prepare import prepare

    args = request.args
    source = data_sources.build(request.cfg.data)
    assert isinstance(source, TextData)
    texts = first(source.source(progress=False), args.megabytes * 1e6)
    if len(texts) < 2:
        raise ConfigError(f"megabytes={args.megabytes:g} does not hold two documents: raise it")
    size = sum(map(len, texts)) / 1e6
    tokenizer = source.tokenizer
    decoded = [text.decode("utf-8", "replace") for text in texts]

    def alone() -> None:
        for text in decoded:
            tokenizer.encoding.encode_to_numpy(text, disallowed_special=())

    def prepared(workers: int, i: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            prepare(
                Documents(texts, f"{i}"),
                tokenizer,
                cache_dir=folder,
                label="bench",
                val_fraction=source.val_fraction,
                workers=workers,
            )

    ways = {f"{workers} thread(s)": workers for workers in dict.fromkeys((1, source.workers))}
    pairs = {name: Pairs() for name in ways}
    for i in range(args.rounds):
        progress(f"preparation, round {i + 1}")
        for name, workers in ways.items():
            for function, clocks in ((alone, pairs[name].base), (partial(prepared, workers, i), pairs[name].own)):
                start = Clock.now()
                function()
                clocks.append(Clock.now().since(start))
    rows, measurements = [], []
    for name, pair in pairs.items():
        inverse = Pairs(pair.own, pair.base).ratio(args.clock)  # of speeds, so that more is better
        base = Pairs(pair.own, pair.base).seconds(args.clock)
        rows.append(
            {
                "preparation with": name,
                "its MB/s / tiktoken's": inverse.median,
                "range": f"{inverse.low:.2f} to {inverse.high:.2f}",
                "MB/s": size / pair.seconds(args.clock),
                "tiktoken alone, 1 thread, MB/s": size / base,
            }
        )
        measurements.append({"preparation": name, "megabytes": size, "base": pair.base, "own": pair.own})
    return rows, measurements


def sampling(request: Request, name: str, cfg: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """The time of making a batch beside that of the step that trains on it."""
    args, machine = request.args, training.machine_of(cfg)
    source = data_sources.build(cfg.data)
    source.prepare(progress=True)
    size = cfg.trainer.batch_size
    source.train_batch(range(size), cfg.train_len, cfg.seed)
    rounds = []
    for _ in range(args.rounds):
        start = Clock.now()
        for i in range(args.batches):
            source.train_batch(range(i * size, (i + 1) * size), cfg.train_len, cfg.seed)
        rounds.append(Clock.now().since(start, args.batches))
    courses = take_turns(
        {"bare": partial(training.bare, cfg, source, machine)}, rounds=args.rounds, threads=args.threads
    )
    step = training.middle(courses["bare"], args.clock)
    own = statistics.median(getattr(batch, args.clock) for batch in rounds)
    row = {
        "data": name,
        "batch / step, %": 100 * own / step,
        "batch": f"{size} x {cfg.train_len}",
        "batch, ms": 1000 * own,
        "step, ms": 1000 * step,
    }
    return row, {"sampling": name, "batch": [batch._asdict() for batch in rounds]} | training.described(courses)


def measure(request: Request) -> Outcome:
    args = request.args
    if args.threads:
        torch.set_num_threads(args.threads)
    rows, measurements = preparation(request)
    tables = [Table("Preparing text", rows)]
    if args.sampling:
        sampled = []
        for name, cfg in request.sampled.items():
            progress(f"sampling {name}")
            row, measured = sampling(request, name, cfg)
            sampled.append(row)
            measurements.append(measured)
        tables.append(Table("Making a batch", sampled))
    note = f"{args.clock} time, medians of {args.rounds} rounds; tokenizer {request.cfg.data['tokenizer']}."
    return Outcome(tables, measurements, [note, f"Measured {time.strftime('%Y-%m-%d')}."])
