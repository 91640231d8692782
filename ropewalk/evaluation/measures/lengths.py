"""Loss against context length, and the loop over all measures.

The same last tokens of each text are read with more and more text before them. So a rise means that the encoding
breaks, and a fall that far text is used. The row at train_len is the baseline of all others: the text cut to what the
network was trained for.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from conf.schema import Config, ConfigError, nearest
from data.base import Data, EvalSet, hash_texts
from model.gpt import GPT
from model.position import Shape, build_encodings
from model.position.network import Encodings, at_scale, max_len_of, scales_of, with_parameters_of
from model.reading import Reader
from ropewalk.app.run_dir import Validation
from ropewalk.evaluation.measures.base import Job, Measure, Plan
from ropewalk.evaluation.measures.far_copies import far_copies
from ropewalk.evaluation.results import Evaluation, Measured, Variant, load_all
from ropewalk.evaluation.scoring import Autocast, Scorer
from ropewalk.training import distributed
from ropewalk.training.hardware import Hardware
from ropewalk.training.provenance import provenance
from ropewalk.training.sharding import evaluating

BINS = 32  # in which the loss by position is averaged
OPTIMUM_TOKENS = 2**20  # that the best possible predictor reads at a time


def validate(
    net: GPT, data: Data, cfg: Config, *, reader: Reader | None = None, autocast: Autocast = nullcontext
) -> Validation:
    """Return the loss on fixed windows of the training length. Every rank calls it and gets the same."""
    part = data.validation(cfg.train_len, cfg.trainer.val_tokens)
    with evaluating(net):
        sums = Scorer(net, None, reader, data.token_bytes, autocast)(part)
    tokens = int(sums.tokens.sum())
    loss = float(sums.nats.sum()) / tokens
    bits = None
    size = int(sums.bytes.sum())
    if size:
        # Group 0 holds the tokens that have bytes.
        bits = float(sums.nats[:, 0].sum()) / math.log(2) / size
    error = None
    if data.task:
        error = 100 * int(sums.errors.sum()) / tokens
    return Validation(loss=loss, bits_per_byte=bits, error=error, tokens=tokens, length=part.length)


def length_settings(cfg: Config) -> dict[str, Any]:
    """Return the settings that decide the texts of the measure `lengths`, besides the data."""
    return {"lengths": cfg.lengths, "target_tokens": cfg.target_tokens, "sequences": cfg.eval.sequences}


@distributed.rank_zero_only
def is_measured(run: Path, cfg: Config) -> bool:
    """Return whether a complete run has results of `lengths` at these lengths, for its encoding and every variant."""
    asked = length_settings(cfg).items()
    measured = []
    for e in load_all(run):
        if e.kind == "lengths" and e.step == cfg.trainer.max_steps and asked <= e.eval.items():
            measured.append(e.variant.pe)
    needed = [cfg.pe, *(cfg.eval.variants or [])]
    return all(pe in measured for pe in needed)


def _lengths(data: Data, cfg: Config) -> Plan:
    # The same texts at every length; only how much of them is read before the targets differs.
    sets = data.eval_sets(cfg.lengths, target_tokens=cfg.target_tokens, sequences=cfg.eval.sequences)
    hashes = [part.texts_hash for part in sets]
    settings = length_settings(cfg) | {"texts": hash_texts(*hashes)}
    jobs = []
    for part in sets:
        optimum = cache(partial(_optimum, data, part))  # computed once for all variants
        jobs.append(Job(part.length, part.n * part.length, partial(_score, data, part, optimum)))
    return Plan("lengths", settings, jobs)


def _score(data: Data, part: EvalSet, optimum: Callable[[int], np.ndarray | None], score: Scorer) -> list[Measured]:
    sums = score(part)
    if data.task:
        return [sums.measured(part.length, texts=part, task=data.task, difficulty=part.name)]
    return [sums.measured(part.length, optimum=optimum(len(sums.nats)), texts=part)]


def _optimum(data: Data, part: EvalSet, n: int) -> np.ndarray | None:
    """Return the nats of the best possible predictor on the first `n` texts, [n, 1]; None if it is not known."""
    batch_size = max(1, OPTIMUM_TOKENS // part.length)
    sums = []
    for start in range(0, n, batch_size):
        losses = data.optimum(*part.batch(start, min(n, start + batch_size)))
        if losses is None:
            return None
        sums.append(losses.sum(dim=1, keepdim=True).numpy())
    return np.concatenate(sums)


def _by_position(data: Data, cfg: Config) -> Plan | None:
    """Return the measure of the loss by position, in one pass at the longest length, in bins of equal width."""
    length = max(cfg.lengths)
    part = data.fully_scored(length, cfg.eval.sequences)
    if part is None:
        return None
    bins = torch.arange(length).chunk(BINS)
    bin_of = torch.empty(length, dtype=torch.int64)
    for i, positions in enumerate(bins):
        bin_of[positions] = i

    def run(score: Scorer) -> list[Measured]:
        of_texts = bin_of.expand(part.n, length)
        sums = score(part, of_texts, len(bins))
        measured = []
        for i, positions in enumerate(bins):
            span = (int(positions[0]), int(positions[-1]))
            measured.append(sums.measured(length, i, texts=part, span=span))
        return measured

    settings = {"length": length, "bins": BINS, "sequences": cfg.eval.sequences, "texts": part.texts_hash}
    return Plan("by_position", settings, [Job(length, part.n * length, run)])


# The measures of the core, by the names that `measures` has for them.
MEASURES: dict[str, Callable[[Data, Config], Plan | None]] = {
    "lengths": _lengths,
    "by_position": _by_position,
    "far_copies": far_copies,
}


def plans(data: Data, cfg: Config, asked: Sequence[str | Measure] | None = None) -> list[Plan]:
    """Return the measures to make.

    Args:
        asked: names in MEASURES, and other measures; None: those that `cfg.eval` asks for, as far as they have a
            meaning for these data.

    Raises ValueError: a measure that was asked for has no meaning for these data, or cannot be made.
    """
    if asked is None:
        # cfg.eval holds for text and tasks alike, so here a measure without meaning is no mistake.
        names = {"lengths": True, "by_position": cfg.eval.by_position, "far_copies": cfg.eval.far_copies}
        made = [MEASURES[name](data, cfg) for name, wanted in names.items() if wanted]
        return [plan for plan in made if plan is not None]
    result = []
    for measure in asked:
        name = measure if isinstance(measure, str) else type(measure).__name__
        make = MEASURES.get(measure) if isinstance(measure, str) else measure.plan
        if make is None:
            raise ConfigError(f"measures: there is no {name}{nearest(name, MEASURES)}")
        plan = make(data, cfg)
        if plan is None:
            needs = "text" if data.task else "an eval.lengths beyond 1"
            raise ConfigError(f"measures: {name} needs {needs}; leave it out")
        result.append(plan)
    return result


def _variants(net: GPT, cfg: Config, hardware: Hardware | None) -> list[tuple[Variant, Encodings]]:
    """Return the encodings of `net` at each of their scales, then those of `eval.variants`, each at its largest."""
    trained_scale, *other_scales = scales_of(net.encodings)
    wanted: list[tuple[Any, float, Encodings]] = [(cfg.pe, scale, net.encodings) for scale in other_scales]
    for pe in cfg.eval.variants or []:
        # Building takes no memory: the parameters are those of the network.
        with torch.device("meta"):
            others = build_encodings(pe, Shape.of(net.cfg, net.train_len))
        others = with_parameters_of(others, net.encodings)
        if hardware is not None:
            distributed.install_kernels(others, hardware)
        wanted.append((pe, max(scales_of(others)), others))

    result = [(_variant(cfg.pe, trained_scale, net.encodings, zero_shot=False), net.encodings)]
    for pe, scale, encodings in wanted:
        # The run's own encoding may be among the variants: it would only be measured twice.
        if not any((variant.pe, variant.scale) == (pe, scale) for variant, _ in result):
            variant = _variant(pe, scale, encodings, zero_shot=True)
            result.append((variant, at_scale(encodings, scale, net.train_len)))
    return result


def _variant(pe: dict[str, Any], scale: float, encodings: Encodings, *, zero_shot: bool) -> Variant:
    """Describe the `encodings` that read the weights."""
    label = pe["name"]
    # An infinite scale says only that the encoding reads any length.
    if len(scales_of(encodings)) > 1 and scale < math.inf:
        label += f" at scale {scale:g}"
    return Variant(label=label, pe=pe, scale=scale, zero_shot=zero_shot)


def evaluate(
    net: GPT, data: Data, cfg: Config, about: Mapping[str, Any] | None, *, measures: Sequence[Plan] | None = None,
    existing: Sequence[Evaluation] = (), hardware: Hardware | None = None, reader: Reader | None = None,
) -> Iterator[Evaluation]:  # fmt: skip
    """Measure a network at each of its scales, and its weights read zero-shot by `cfg.eval.variants`.

    Every rank calls it. Each result is yielded as soon as it is measured, so that it can be saved.

    Args:
        about: run, run_id, step and provenance of the results. None: a dry run on one text of each set. It yields
            nothing, and raises the errors that the measurement would, except for lack of memory.
        measures: what to measure; None: what `cfg.eval` asks for.
        existing: results that are not measured again, if the settings are the same.
        hardware: of the run, whose precision and kernels are used; None: the precision of the weights, without kernels.
        reader: says how texts are read; None: as documents, if `data` tells these apart.
    """
    measures = plans(data, cfg) if measures is None else measures
    reader = reader or Reader(data.document_end)
    variants = _variants(net, cfg, hardware)
    autocast = nullcontext if hardware is None else hardware.autocast
    tokens_of = [sum(job.tokens for job in plan.jobs) for plan in measures]
    prints = about is not None and distributed.is_rank_zero()
    with evaluating(net), Progress(disable=not (prints and sys.stdout.isatty()), transient=True) as bar:
        task = bar.add_task("", total=len(variants) * sum(tokens_of))
        for variant, encodings in variants:
            # One scorer serves all measures of a variant: it keeps the losses that several of them need.
            limit = None if about else 1
            score = Scorer(net, encodings, reader, data.token_bytes, autocast, limit, partial(bar.advance, task))
            for plan, tokens in zip(measures, tokens_of, strict=True):
                evaluation = None
                if about:
                    # Without its numbers yet: the name of its file tells whether it was measured before.
                    run = {"seed": cfg.seed, "train_len": cfg.train_len, "task": data.task, **about}
                    evaluation = Evaluation(kind=plan.kind, eval=plan.eval, variant=variant, measured=[], **run)
                    evaluation.provenance["kernels"] = hardware is not None and hardware.kernels
                    same = [e for e in existing if e.file_name == evaluation.file_name]
                    if same:
                        yield from same
                        bar.advance(task, tokens)
                        continue
                message = f"measuring {plan.kind.replace('_', ' ')} of {variant.label}"
                bar.update(task, description=message)
                # Without a terminal there is no bar: a log gets a line for each measure.
                if prints and bar.disable:
                    print(message, flush=True)
                measured, skipped = _measure_plan(plan, score)
                if evaluation:
                    yield evaluation.model_copy(update={"measured": measured, "skipped": skipped})


def _measure_plan(plan: Plan, score: Scorer) -> tuple[list[Measured], list[int]]:
    """Return the results of a measure, and the lengths that are skipped because the encoding ends before them."""
    measured: list[Measured] = []
    skipped = set()
    max_len = max_len_of(score.encodings or score.net.encodings)
    for job in plan.jobs:
        if max_len and job.length > max_len:
            skipped.add(job.length)
        else:
            measured += job.run(score)
    return measured, sorted(skipped)


def measure(
    net: GPT, data: Data, cfg: Config, hardware: Hardware, run: Path, *, run_id: str, step: int,
    measures: Sequence[Plan] | None = None, existing: Sequence[Evaluation] | None = None, reader: Reader | None = None,
) -> list[Evaluation]:  # fmt: skip
    """Run `evaluate` on the weights of the run at `run` after `step`, and return the results.

    Every rank calls it. Rank zero saves each result in evals/ as soon as it is measured.

    Args:
        existing: as in `evaluate`; None: all results of the run.
        reader: as in `evaluate`.
    """
    if existing is None:
        existing = distributed.on_rank_zero(lambda: load_all(run))
    origin = provenance(device=hardware.device, precision=hardware.precision)
    about = {"run": run.name, "run_id": run_id, "step": step, "provenance": origin}
    results = []
    options = {"measures": measures, "existing": existing, "hardware": hardware, "reader": reader}
    for result in evaluate(net, data, cfg, about, **options):
        if distributed.is_rank_zero():
            result.save(run / "evals")
        results.append(result)
    return results
