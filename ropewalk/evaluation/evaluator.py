"""The loop over measures: what a network is worth, as it was trained and read in other ways."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from conf.errors import ConfigError, nearest
from conf.schema import Config
from data.base import Data
from model.gpt import GPT
from model.layout import Packing
from model.position import Shape, build_encodings
from model.position.network import Encodings, at_scale, max_len_of, scales_of, with_parameters_of
from ropewalk.evaluation.measures.base import Measure, Plan
from ropewalk.evaluation.measures.far_copies import far_copies
from ropewalk.evaluation.measures.lengths import by_position, length_settings, lengths
from ropewalk.evaluation.results import Evaluation, Measured, Variant, load_all
from ropewalk.evaluation.scoring import Autocast, Scorer
from ropewalk.run import processes
from ropewalk.run.directory import check_place
from ropewalk.run.provenance import provenance
from ropewalk.training import distributed
from ropewalk.training.hardware import Hardware
from ropewalk.training.ranks import evaluating

Variants = list[tuple[Variant, Encodings]]  # of the weights of one network


def validate(
    net: GPT, data: Data, cfg: Config, *, packing: Packing | None = None, autocast: Autocast = nullcontext
) -> dict[str, Any]:
    """Return means over every target of fixed windows of the training length. All ranks call it, and get the same.

    Returns:
        loss: nats per token.
        bits_per_byte: without the tokens that stand for no bytes, such as the end of a text; None where bytes mean
            nothing.
        error: percent of the tokens; None for text.
        tokens, length: of the windows.
    """
    part = data.validation(cfg.train_len, cfg.trainer.val_tokens)
    with evaluating(net):
        sums = Scorer(net, None, packing or Packing(), data.token_bytes, autocast)(part)
    tokens = int(sums.tokens.sum())
    size = int(sums.bytes.sum())
    bits = float(sums.nats[:, 0].sum()) / math.log(2)  # group 0 holds the tokens that have bytes
    return {
        "loss": float(sums.nats.sum()) / tokens,
        "bits_per_byte": bits / size if size else None,
        "error": 100 * int(sums.errors.sum()) / tokens if data.task else None,
        "tokens": tokens,
        "length": part.length,
    }


@processes.rank_zero_only
def is_measured(run: Path, cfg: Config) -> bool:
    """Return whether a complete run has all results that `cfg.eval` asks for, of its encoding and every variant."""
    final = [e for e in load_all(run) if e.step == cfg.trainer.max_steps]
    is_text = not any(e.task for e in final)
    # The settings of each kind of results that is asked for, on the conditions under which `plans` makes them, but
    # without reading the data.
    asked = {"lengths": length_settings(cfg)}
    at_longest = {"length": max(cfg.lengths), "sequences": cfg.eval.sequences}
    if cfg.eval.by_position and is_text:
        asked["by_position"] = at_longest
    if cfg.eval.far_copies and is_text and max(cfg.lengths) > cfg.train_len:
        asked["far_copies"] = at_longest
    found = []
    for e in final:
        if e.kind in asked and asked[e.kind].items() <= e.eval.items():
            found.append((e.kind, e.variant.pe))
    needed = [cfg.pe, *(cfg.eval.variants or [])]
    return all((kind, pe) in found for kind in asked for pe in needed)


# The measures of the core, by the names that `eval` and `measures` have for them.
MEASURES: dict[str, Callable[[Data, Config], Plan | None]] = {
    "lengths": lengths,
    "by_position": by_position,
    "far_copies": far_copies,
}


def plans(data: Data, cfg: Config, asked: Sequence[str | Measure] | None = None) -> list[Plan]:
    """Return the measures to make.

    Args:
        asked: names in MEASURES, and other measures; None: those that `cfg.eval` asks for, as far as they have a
            meaning for these data.

    Raises ValueError: a measure that was asked for has no meaning for these data, or cannot be made.
    """
    # `eval.lengths` counts as a flag too: a list that is never empty.
    wanted = [name for name in MEASURES if getattr(cfg.eval, name)] if asked is None else asked
    made = []
    for named_or_own in wanted:
        name = named_or_own if isinstance(named_or_own, str) else type(named_or_own).__name__
        make = MEASURES.get(named_or_own) if isinstance(named_or_own, str) else named_or_own.plan
        if make is None:
            raise ConfigError(f"measures: there is no {name}{nearest(name, MEASURES)}")
        plan = make(data, cfg)
        if plan is not None:
            made.append(plan)
        elif asked is not None:  # cfg.eval holds for text and tasks alike: without a meaning it is no mistake there
            raise ConfigError(
                f"measures: {name} has no meaning for these data or lengths (by_position and far_copies need "
                f"text, far_copies also a length beyond train_len); leave it out"
            )
    return made


def variants_of(net: GPT, cfg: Config, hardware: Hardware) -> Variants:
    """Return the encodings of `net` at each of their scales, then those of `eval.variants`, each at its largest."""
    wanted: list[tuple[Any, float, Encodings]] = [(cfg.pe, scale, net.encodings) for scale in scales_of(net.encodings)]
    variants: list[Any] = cfg.eval.variants or []
    for pe in variants:
        others = _encodings(net, pe, net.train_len, hardware)
        wanted.append((pe, max(scales_of(others)), others))
    result: Variants = []
    for pe, scale, encodings in wanted:
        known = [(variant.pe, variant.scale) for variant, _ in result]
        # The run's own encoding may be among the variants: it would only be measured twice.
        if (pe, scale) not in known:
            # The first is the network as it was trained, every other one is zero-shot.
            variant = _variant(pe, scale, encodings, zero_shot=len(result) > 0)
            result.append((variant, at_scale(encodings, scale, net.train_len)))
    return result


def _encodings(net: GPT, pe: dict[str, Any], train_len: int, hardware: Hardware) -> Encodings:
    """Return encodings with the options `pe` that read the weights of `net`."""
    # Building takes no memory: the parameters are those of the network.
    with torch.device("meta"):
        built = build_encodings(pe, Shape.of(net.cfg, train_len))
    encodings = with_parameters_of(built, net.encodings)
    distributed.install_kernels(encodings, hardware)
    return encodings


def _variant(pe: dict[str, Any], scale: float, encodings: Encodings, *, zero_shot: bool) -> Variant:
    """Describe the `encodings` that read the weights."""
    label = pe["name"]
    # An infinite scale says only that the encoding reads any length.
    if len(scales_of(encodings)) > 1 and scale < math.inf:
        label += f" at scale {scale:g}"
    return Variant(label=label, pe=pe, scale=scale, zero_shot=zero_shot)


def _measure_plan(plan: Plan, score: Scorer) -> tuple[list[Measured], list[int]]:
    """Return the results of a measure, and the lengths that are skipped because the encoding ends before them."""
    max_len = max_len_of(score.encodings or score.net.encodings) or math.inf  # None: they read any length
    skipped = {part.length for part in plan.parts if part.length > max_len}
    measured: list[Measured] = []
    for part in plan.parts:
        if part.length not in skipped:
            measured += part.run(score)
    return measured, sorted(skipped)


def rehearse(net: GPT, data: Data, cfg: Config, *, hardware: Hardware, packing: Packing | None = None) -> None:
    """Read one text of each set that `cfg.eval` asks for, so that an error comes now. Every rank calls it.

    Raises the errors that `measure` would, except for lack of memory.
    """
    measures = plans(data, cfg)
    with evaluating(net):
        for _, encodings in variants_of(net, cfg, hardware):
            score = Scorer(net, encodings, packing or Packing(), data.token_bytes, hardware.autocast, limit=1)
            for plan in measures:
                _measure_plan(plan, score)


def measure(
    net: GPT, data: Data, cfg: Config, hardware: Hardware, run: Path, *, run_id: str, step: int,
    train_len: int | None = None, asked: Sequence[str | Measure] | None = None, variants: Variants | None = None,
    existing: Sequence[Evaluation] | None = None, packing: Packing | None = None,
) -> list[Evaluation]:  # fmt: skip
    """Measure the weights of the run at `run` after `step`: at each scale, and read zero-shot by `cfg.eval.variants`.

    Every rank calls it. Rank zero saves each result in evals/ as soon as it is measured.

    Args:
        hardware: of the run, whose precision and kernels are used.
        train_len: of the weights; None: that of the run.
        asked: what to measure, as in `plans`; None: what `cfg.eval` asks for.
        variants: how to read the weights; None: as above.
        existing: results that are not measured again, if the settings are the same; None: all results of the run.
        packing: says how texts are read; None: as documents, if `data` tells these apart.

    Raises ValueError: as `plans` does.
    """
    if existing is None:
        existing = processes.on_rank_zero(lambda: load_all(run))
    measures = plans(data, cfg, asked)
    packing = packing or Packing(data.document_end)
    variants = variants_of(net, cfg, hardware) if variants is None else variants
    is_first = processes.is_rank_zero()
    results: list[Evaluation] = []
    with evaluating(net):
        for variant, encodings in variants:
            # One scorer serves all measures of a variant: it keeps the losses that several of them need.
            score = Scorer(net, encodings, packing, data.token_bytes, hardware.autocast)
            kernels = any(getattr(pe, "is_twin", False) for pe in encodings)
            origin = provenance(device=hardware.device, precision=hardware.precision, kernels=kernels)
            for plan in measures:
                # Without its numbers yet: the name of its file tells whether it was measured before.
                result = Evaluation(
                    kind=plan.kind,
                    run=run.name,
                    run_id=run_id,
                    seed=cfg.seed,
                    train_len=train_len or cfg.train_len,
                    task=data.task,
                    step=step,
                    variant=variant,
                    eval=plan.eval,
                    provenance=origin,
                    measured=[],
                )
                known = [e for e in existing if e.file_name == result.file_name]
                if known:
                    results += known
                    continue
                if is_first:
                    print(f"measuring {plan.kind.replace('_', ' ')} of {variant.label}", flush=True)
                measured, skipped = _measure_plan(plan, score)
                result = result.model_copy(update={"measured": measured, "skipped": skipped})
                results.append(result)
                if is_first:
                    check_place(run, run_id)
                    result.save(run / "evals")
    return results


def measure_start(
    net: GPT, data: Data, cfg: Config, hardware: Hardware, run: Path, base: Mapping[str, Any], *, run_id: str,
    step: int, packing: Packing | None = None,
) -> None:  # fmt: skip
    """Measure the weights of the model `base` before the first step, on the texts of `lengths`. Every rank calls it.

    They are read as that model reads them, and by the encodings of `net`. Nothing is measured without a base, after a
    step, or where some weights are new.
    """
    if not base or step or not cfg.trainer.max_steps or cfg.init_partial:
        return
    variants = variants_of(net, cfg, hardware)[:1]  # the network's own, as it is trained
    if base["pe"] != cfg.pe:
        encodings = _encodings(net, base["pe"], base["train_len"], hardware)
        variant = _variant(base["pe"], scales_of(encodings)[0], encodings, zero_shot=True)
        variants.insert(0, (variant, encodings))
    measure(
        net, data, cfg, hardware, run, run_id=run_id, step=0, train_len=base["train_len"], asked=["lengths"],
        variants=variants, packing=packing,
    )  # fmt: skip
