"""Loss against context length: the same last tokens of each text, read with more and more text before them. So a rise
means that the encoding breaks, and a fall that far text is used. The row at train_len is the baseline of all others:
the text cut to what the network was trained for."""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from app.run_dir import Validation
from conf.schema import Config
from data.base import Data, EvalSet, hash_texts
from evaluation.measures.far_copies import far_copies
from evaluation.measures.ruler import ruler
from evaluation.results import Evaluation, Measured, Variant, load_all
from evaluation.scoring import Autocast, Job, Plan, Scorer
from model.gpt import GPT
from training import distributed
from training.hardware import Hardware
from training.provenance import provenance
from training.sharding import evaluating, full_tensor

BINS = 32  # of the loss by position


def validate(net: GPT, data: Data, cfg: Config, autocast: Autocast = nullcontext) -> Validation:
    """The loss on fixed windows of the training length; all ranks call it and get the same."""
    part = data.validation(cfg.train_len, cfg.trainer.val_tokens)
    with evaluating(net):
        sums = Scorer(net, data.token_bytes, autocast)(part)
    tokens, size = int(sums.tokens.sum()), int(sums.bytes.sum())
    bits = float(sums.nats[:, 0].sum()) / math.log(2) / size if size else None
    error = 100 * int(sums.errors.sum()) / tokens if data.task else None
    loss = float(sums.nats.sum()) / tokens
    return Validation(loss=loss, bits_per_byte=bits, error=error, tokens=tokens, length=part.length)


def length_settings(cfg: Config) -> dict[str, Any]:
    """What decides the texts of the measure `lengths`, besides the data."""
    return {"lengths": cfg.lengths, "target_tokens": cfg.target_tokens, "sequences": cfg.eval.sequences}


@distributed.rank_zero_only
def is_measured(run: Path, cfg: Config) -> bool:
    """Whether evals/ of a complete run has `lengths` at these lengths, of its own encoding and every variant."""
    asked, there = length_settings(cfg), [e for e in load_all(run) if e.step == cfg.trainer.max_steps]
    found = [e.variant.pe for e in there if e.kind == "lengths" and asked.items() <= e.eval.items()]
    return all(pe in found for pe in [cfg.pe, *(cfg.eval.variants or [])])


def _lengths(data: Data, cfg: Config) -> Plan:
    sets = data.eval_sets(cfg.lengths, target_tokens=cfg.target_tokens, sequences=cfg.eval.sequences)
    settings = length_settings(cfg) | {"texts": hash_texts(*(part.texts_hash for part in sets))}

    def run(part: EvalSet, score: Scorer) -> list[Measured]:
        return [score(part).measured(part.name, part.length)]

    return Plan("lengths", settings, [Job(part.length, part.n * part.length, partial(run, part)) for part in sets])


def _by_position(data: Data, cfg: Config) -> Plan | None:
    """Loss by position, in one pass at the longest length, in bins of equal width."""
    length = max(cfg.lengths)
    part = data.fully_scored(length, cfg.eval.sequences)
    if part is None:
        return None
    bins = torch.arange(length).chunk(BINS)
    bin_of = torch.cat([torch.full_like(own, i) for i, own in enumerate(bins)])

    def run(score: Scorer) -> list[Measured]:
        sums = score(part, bin_of.expand(part.n, length), len(bins))
        return [sums.measured(f"positions {own[0]}-{own[-1]}", length, i) for i, own in enumerate(bins)]

    settings = {"length": length, "bins": BINS, "sequences": cfg.eval.sequences, "texts": part.texts_hash}
    return Plan("by_position", settings, [Job(length, part.n * length, run)])


def plans(data: Data, cfg: Config, names: Sequence[str] | None = None, of_ruler: Mapping | None = None) -> list[Plan]:
    """The measures `names`; None: those that `cfg.eval` asks for and these data have. `of_ruler` are options of
    `evaluation.measures.ruler`. ValueError if a measure has no meaning for these data."""
    make: dict[str, Callable[[], Plan | None]] = {
        "lengths": lambda: _lengths(data, cfg),
        "by_position": lambda: _by_position(data, cfg),
        "far_copies": lambda: far_copies(data, cfg),
        "ruler": lambda: ruler(data, cfg.lengths, **(of_ruler or {})),
    }
    found = []
    for name in names or [name for name in make if getattr(cfg.eval, name, False)]:
        plan = make[name]()
        if plan is None and names:
            needs = "text" if data.task else "an eval.lengths beyond 1"
            raise ValueError(f"measures: {name} needs {needs}; leave it out")
        found += [plan] if plan else []
    return found


def _variants(net: GPT, cfg: Config) -> list[tuple[Variant, GPT]]:
    """The network at each of its scales, then read by `eval.variants`, each at its largest scale."""
    readers = [(cfg.pe, scale, net) for scale in net.scales]
    others: list[Any] = cfg.eval.variants or []
    weights = {name: full_tensor(tensor) for name, tensor in net.state_dict().items()} if others else {}
    for pe in others:
        with torch.device("meta"):
            other = GPT(net.cfg, pe, vocab_size=net.vocab_size, train_len=net.train_len)
        other.load_state_dict(weights, assign=True)
        scale = max(other.scales)
        if (pe, scale) not in [(known, own) for known, own, _ in readers]:
            readers.append((pe, scale, other.eval()))
    found = []
    for pe, scale, reader in readers:
        scaled = len(reader.scales) > 1 and scale < math.inf  # at infinity an encoding reads any length
        label = f"{pe['name']} at scale {scale:g}" if scaled else pe["name"]
        zero_shot = reader is not net or scale != net.scales[0]
        found.append((Variant(label=label, pe=pe, scale=scale, zero_shot=zero_shot), reader))
    return found


def evaluate(
    net: GPT, data: Data, cfg: Config, about: Mapping[str, Any] | None, *, measures: Sequence[Plan] | None = None,
    existing: Sequence[Evaluation] = (), autocast: Autocast = nullcontext,
) -> Iterator[Evaluation]:  # fmt: skip
    """Measure a network at each of its scales, and its weights read zero-shot by `cfg.eval.variants`, on every rank.
    Each result comes when it is there, so that it can be saved.

    Args:
        about: run, run_id, step and provenance of the results; None makes a dry run on one text of each set, which has
            no results and meets the errors of the whole one, but for its memory.
        measures: what to measure; None: what `cfg.eval` asks for.
        existing: results that are not measured again, if the settings are the same.
        autocast: called for a context manager in which the network computes as in training.
    """
    measures = plans(data, cfg) if measures is None else measures
    readers = _variants(net, cfg)
    progress = about is not None and distributed.is_rank_zero()
    with evaluating(net), Progress(disable=not (progress and sys.stdout.isatty()), transient=True) as bar:
        task = bar.add_task("", total=len(readers) * sum(job.tokens for plan in measures for job in plan.jobs))
        for (variant, reader), plan in itertools.product(readers, measures):
            if plan is measures[0]:  # one for all measures of a reader; what it keeps goes with it
                score = Scorer(reader, data.token_bytes, autocast, None if about else 1, partial(bar.advance, task))
            if about:
                run = {"seed": cfg.seed, "train_len": cfg.train_len, "task": data.task, **about}
                made = Evaluation(kind=plan.kind, eval=plan.eval, variant=variant, measured=[], **run)
                if known := [e for e in existing if e.file_name == made.file_name]:
                    yield from known
                    bar.advance(task, sum(job.tokens for job in plan.jobs))
                    continue
            what = f"measuring {plan.kind.replace('_', ' ')} of {variant.label}"
            bar.update(task, description=what)
            if progress and bar.disable:
                print(what, flush=True)
            with reader.at_scale(variant.scale):
                too_long = {job.length for job in plan.jobs if reader.max_len and job.length > reader.max_len}
                measured = [m for job in plan.jobs if job.length not in too_long for m in job.run(score)]
            if about:
                yield made.model_copy(update={"measured": measured, "skipped": sorted(too_long)})


def measure(
    net: GPT, data: Data, cfg: Config, hardware: Hardware, run: Path, *, run_id: str, step: int,
    measures: Sequence[Plan] | None = None, existing: Sequence[Evaluation] | None = None,
) -> list[Evaluation]:  # fmt: skip
    """`evaluate` `net`, the weights of the run at `run` after `step`, on every rank. Rank zero saves each result in
    evals/ as soon as it is measured. `existing`: as in `evaluate`; default: all results of the run."""
    known = distributed.on_rank_zero(lambda: load_all(run)) if existing is None else existing
    made = provenance(device=hardware.device, precision=hardware.precision)
    about = {"run": run.name, "run_id": run_id, "step": step, "provenance": made}
    found = []
    for evaluation in evaluate(net, data, cfg, about, measures=measures, existing=known, autocast=hardware.autocast):
        if distributed.is_rank_zero():
            evaluation.save(run / "evals")
        found.append(evaluation)
    return found
