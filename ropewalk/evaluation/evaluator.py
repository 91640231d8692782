"""What the weights of a run are worth: as they were trained, at other scales, and read zero-shot by other encodings."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.errors import ConfigError
from conf.schema import Config
from data.base import IGNORE_INDEX, Data
from model.gpt import GPT
from model.layout import Packing
from model.position import Shape, build_encodings
from model.position.network import Encodings, at_scale, exact_above, max_len_of, scales_of, with_parameters_of
from ropewalk.evaluation.measures.base import Measure, Plan
from ropewalk.evaluation.measures.far_copies import far_copies
from ropewalk.evaluation.measures.lengths import by_position, length_settings, lengths, longest_settings
from ropewalk.evaluation.results import Evaluation, PartResult, Variant, load_all
from ropewalk.evaluation.scoring import Scorer
from ropewalk.run import processes
from ropewalk.run.directory import RunDir, check_place
from ropewalk.run.provenance import provenance
from ropewalk.training import distributed
from ropewalk.training.hardware import Hardware
from ropewalk.training.ranks import evaluating

Variants = list[tuple[Variant, Encodings]]  # of the weights of one network


class Weights(NamedTuple):
    """The weights that are measured, as results name them."""

    run: RunDir
    step: int
    train_len: int  # that they were trained at


# The measures of the core, by the names that `eval` and `measures` have for them.
MEASURES: dict[str, Callable[[Data, Config], Plan]] = {
    "lengths": lengths,
    "by_position": by_position,
    "far_copies": far_copies,
}


def meaningful(cfg: Config, *, is_text: bool) -> dict[str, dict[str, Any]]:
    """Return those MEASURES that have a meaning, each with its settings as far as the data do not decide them."""
    settings = {"lengths": length_settings(cfg)}
    if is_text:
        settings["by_position"] = longest_settings(cfg)
        if max(cfg.lengths) > cfg.train_len:
            settings["far_copies"] = longest_settings(cfg)
    return settings


def asked_for(cfg: Config, *, is_text: bool) -> dict[str, dict[str, Any]]:
    """Return those of the `meaningful` measures that `cfg.eval` asks for."""
    settings = meaningful(cfg, is_text=is_text)
    # `eval.lengths` counts as a flag too: a list that is never empty.
    return {name: settings[name] for name in settings if getattr(cfg.eval, name)}


@processes.rank_zero_only
def is_measured(run: Path, cfg: Config) -> bool:
    """Return whether a complete run has all results that `cfg.eval` asks for, of its encoding and every variant."""
    final = [e for e in load_all(run) if e.step == cfg.trainer.max_steps]
    asked = asked_for(cfg, is_text=not any(e.task for e in final))
    measured = []
    for e in final:
        if e.kind in asked and asked[e.kind].items() <= e.eval.items():
            measured.append((e.kind, (e.variant.pe, e.variant.scale)))
    needed: list[Any] = [(cfg.pe, scale) for scale in _scales(cfg, cfg.pe)]
    needed += [(pe, max(_scales(cfg, pe))) for pe in cfg.eval.variants or []]
    return all(pair in measured for pair in product(asked, needed))


def _scales(cfg: Config, pe: Any) -> Sequence[float]:
    """The scales of the encodings with the options `pe`."""
    with torch.device("meta"):
        return scales_of(build_encodings(pe, Shape.of(cfg.model, cfg.train_len)))


def plans(data: Data, cfg: Config, asked: Sequence[str | Measure] | None = None) -> list[Plan]:
    """Return the measures to make.

    Args:
        asked: names in MEASURES, and other measures; None: those that `cfg.eval` asks for, as far as they have a
            meaning for these data.

    Raises ValueError: a measure that was asked for has no meaning for these data, or cannot be made.
    """
    is_text = data.task is None
    result = []
    for measure in asked_for(cfg, is_text=is_text) if asked is None else asked:
        if isinstance(measure, Measure):
            plan = measure.plan(data, cfg)
        else:
            plan = MEASURES[measure](data, cfg) if measure in meaningful(cfg, is_text=is_text) else None
        if plan is None:
            name = measure if isinstance(measure, str) else type(measure).__name__
            raise ConfigError(
                f"measures: {name} does not apply to these data or lengths (by_position, far_copies and reach "
                "need text, far_copies also a length beyond train_len, reach data.documents=cross); leave it out"
            )
        result.append(plan)
    return result


class Evaluator:
    """Evaluates the weights of one network. Every rank calls its methods alike.

    Args:
        net: its weights may change between the calls.
        hardware: whose precision and kernels are used.
        packing: of the texts; None: documents are read apart, if `data` tells them apart.
    """

    def __init__(self, net: GPT, data: Data, cfg: Config, hardware: Hardware, packing: Packing | None = None) -> None:
        self.net = net
        self.data = data
        self.cfg = cfg
        self.hardware = hardware
        self.packing = packing or Packing(data.document_end, exact_above=exact_above(net.encodings))

    def validate(self) -> dict[str, Any]:
        """Return means over every target of fixed windows of the training length, at the scale of training.

        Returns:
            loss: nats per token.
            bits_per_byte: without the tokens that stand for no bytes, such as the end of a text; None where bytes mean
                nothing.
            error: percent of the tokens; None for text.
            tokens, length: of the windows.
        """
        texts = self.data.validation(self.cfg.train_len, self.cfg.trainer.val_tokens)
        with evaluating(self.net):
            sums = self._scorer()(texts)
        tokens = int(sums.tokens.sum())
        size = int(sums.bytes.sum())
        bits = float(sums.nats[:, 0].sum()) / math.log(2)  # group 0 holds the tokens that have bytes
        return {
            "loss": float(sums.nats.sum()) / tokens,
            "bits_per_byte": bits / size if size else None,
            "error": 100 * int(sums.errors.sum()) / tokens if self.data.task else None,
            "tokens": tokens,
            "length": texts.length,
        }

    @cached_property
    def planned(self) -> list[Plan]:
        """The measures that `cfg.eval` asks for. The first is that of `lengths`, whatever else is asked for."""
        return plans(self.data, self.cfg)

    def is_due(self, step: int) -> bool:
        """Whether the weights after this step of training are measured, or write a sample."""
        return step in self.cfg.eval.at or self._samples(step)

    def _samples(self, step: int) -> bool:
        return self.cfg.trainer.sample_every > 0 and step % self.cfg.trainer.sample_every == 0

    def measure_or_sample(self, run: RunDir, step: int, show: Callable[[str, int], None]) -> None:
        """Do what is due while a run trains: `show` a sample and its step, measure the weights."""
        if self._samples(step):
            show(self.sample(), step)
        if step in self.cfg.eval.at:
            self.measure(run, step)

    @torch.no_grad()
    def sample(self) -> str:
        """What the network writes, each time the likeliest token, after the first half of a text: at most 64 tokens.

        Of a task: a text with its answers, and the right ones.
        """
        x, y = self.data.validation(self.cfg.train_len, self.cfg.trainer.val_tokens).batch(0, 1)
        if self.data.task:
            asked = y[0] != IGNORE_INDEX
            shown = {"text": x[0], "answers": self._likeliest(x)[asked], "right": y[0, asked]}
            return "\n".join(f"{what}: {self.data.decode(ids.tolist())}" for what, ids in shown.items())
        middle = x.size(1) // 2
        end = min(x.size(1), middle + 64)
        for place in range(middle, end):
            x[0, place] = self._likeliest(x)[place - 1]
        prompt, written = x[0, :middle].tolist(), x[0, middle:end].tolist()
        return f"text: {self.data.decode(prompt)}\nwritten: {self.data.decode(written)}"

    def _likeliest(self, x: Tensor) -> Tensor:
        """The likeliest token after each of the first text of `x` int64 [1, T]: int64 [T]."""
        layout = self.packing(x)
        with evaluating(self.net), self.hardware.autocast():
            hidden = layout.gathered(self.net.hidden_states(x.to(self.hardware.device), layout))[:, : x.size(1)]
            pieces = self.net.in_pieces(lambda logits, _: logits.argmax(-1), hidden, hidden)
        return torch.cat(pieces, dim=1)[0].cpu()

    def tokens(self) -> int:
        """About how many tokens `measure` will read, to estimate its time."""
        of_variant = self.cfg.eval.sequences * sum(part.length for part in self.planned[0].parts)
        return of_variant * len(self._variants())

    def rehearse(self) -> None:
        """Read one text of each set that `cfg.eval` asks for, so that an error comes now.

        Raises the errors that `measure` would, except for lack of memory.
        """
        with evaluating(self.net):
            for _, encodings in self._variants():
                scorer = self._scorer(encodings, limit=1)
                for plan in self.planned:
                    _run_plan(plan, scorer)

    def measure(
        self, run: RunDir, step: int, asked: Sequence[str | Measure] | None = None,
        existing: Sequence[Evaluation] | None = None,
    ) -> list[Evaluation]:  # fmt: skip
        """Measure the weights of `run` after `step`, at each scale, and read zero-shot by `cfg.eval.variants`.

        Rank zero saves each result in evals/ as soon as it is measured.

        Args:
            asked: what to measure, as in `plans`; None: what `cfg.eval` asks for.
            existing: results that are not measured again, if the settings are the same; None: all results of the run.

        Raises ValueError: as `plans` does.
        """
        weights = Weights(run, step, self.cfg.train_len)
        planned = self.planned if asked is None else plans(self.data, self.cfg, asked)
        return self._measure(weights, planned, self._variants(), existing)

    def measure_start(self, run: RunDir, base: Mapping[str, Any]) -> None:
        """Measure the weights of the model `base` before the first step, on the texts of `lengths`.

        They are read as that model reads them, and as the network does if that is something else.
        """
        network, encodings_of_network = self._variants()[0]  # as it is trained
        encodings = self._encodings(base["pe"], base["train_len"])
        scale = scales_of(encodings)[0]
        # Equal options may read otherwise, as a temperature that counts from the training length, and options that are
        # missing or that do nothing may differ.
        is_other = self._first_text(encodings) != self._first_text(encodings_of_network)
        pe, name = base["pe"], base["pe"]["name"]
        if is_other and (pe, scale) == (network.pe, network.scale):
            pe = {**pe, "train_len": base["train_len"]}  # which alone tells the two apart
        elif network.pe == pe:
            # An infinite scale says that a training-free extension is active.
            reading = "extended" if network.scale == math.inf else f"at scale {network.scale:g}"
            network = network.model_copy(update={"label": f"{name} {reading}"})
        # Reports look for the model's own reading by this label.
        variants = [(Variant(label=name, pe=pe, scale=scale, zero_shot=is_other), encodings)]
        if is_other:
            variants.append((network, encodings_of_network))
        self._measure(Weights(run, 0, base["train_len"]), self.planned[:1], variants)

    def _first_text(self, encodings: Encodings) -> tuple[list[PartResult], list[int]]:
        """What the `encodings` make of the first text of each length."""
        with evaluating(self.net):
            return _run_plan(self.planned[0], self._scorer(encodings, limit=1))

    def _measure(
        self, weights: Weights, plans: Sequence[Plan], variants: Variants,
        existing: Sequence[Evaluation] | None = None,
    ) -> list[Evaluation]:  # fmt: skip
        """Return the results of each plan by each variant, which are measured unless they are in `existing`.

        Rank zero saves each at once. `existing` is as of `measure`.
        """
        run = weights.run
        if existing is None:
            existing = processes.on_rank_zero(lambda: load_all(run.path))
        known = {e.file_name: e for e in existing}
        is_rank_zero = processes.is_rank_zero()
        results: list[Evaluation] = []
        with evaluating(self.net):
            for variant, encodings in variants:
                # One scorer serves all measures of a variant: it keeps the losses that several of them need.
                scorer = self._scorer(encodings)
                for plan in plans:
                    # Without its numbers yet: the name of its file tells whether it was measured before.
                    result = self._result(weights, plan, variant, encodings)
                    if result.file_name not in known:
                        if is_rank_zero:
                            print(f"measuring {plan.kind.replace('_', ' ')} of {variant.label}", flush=True)
                        measured, skipped = _run_plan(plan, scorer)
                        result = result.model_copy(update={"measured": measured, "skipped": skipped})
                        if is_rank_zero:
                            check_place(run.path, run.run_id)
                            result.save(run.path / "evals")
                    results.append(known.get(result.file_name, result))
        return results

    def _result(self, weights: Weights, plan: Plan, variant: Variant, encodings: Encodings) -> Evaluation:
        """The results of a measure, without any numbers."""
        hardware = self.hardware
        kernels = any(getattr(pe, "is_twin", False) for pe in encodings)
        return Evaluation(
            kind=plan.kind,
            run=weights.run.path.name,
            run_id=weights.run.run_id,
            seed=self.cfg.seed,
            train_len=weights.train_len,
            task=self.data.task,
            step=weights.step,
            variant=variant,
            eval=plan.eval,
            provenance=provenance(device=hardware.device, precision=hardware.precision, kernels=kernels),
            measured=[],
        )

    def _scorer(self, encodings: Encodings | None = None, limit: int | None = None) -> Scorer:
        return Scorer(self.net, encodings, self.packing, self.data.token_bytes, self.hardware.autocast, limit)

    def _variants(self) -> Variants:
        """The network's encodings at each of their scales, then those of `eval.variants`, each at its largest.

        The network's own scale is that of its configuration. That of a variant was chosen for the longest text, unless
        the user gave it: see `ropewalk.app.resolve.scaled_to`.
        """
        cfg = self.cfg
        trained = self.net.encodings
        wanted: list[tuple[Any, float, Encodings]] = [(cfg.pe, scale, trained) for scale in scales_of(trained)]
        for pe in cfg.eval.variants or []:
            others = self._encodings(pe, self.net.train_len)
            wanted.append((pe, max(scales_of(others)), others))
        result: Variants = []
        known = []
        for pe, scale, encodings in wanted:
            # The run's own encoding may be among the variants: it would only be measured twice.
            if (pe, scale) not in known:
                known.append((pe, scale))
                # The first is the network as it was trained, every other one is zero-shot.
                variant = _variant(pe, scale, encodings, zero_shot=len(result) > 0)
                result.append((variant, at_scale(encodings, scale)))
        return result

    def _encodings(self, pe: Any, train_len: int) -> Encodings:
        """Encodings with the options `pe` that read the weights of the network."""
        # Building takes no memory: the parameters are those of the network.
        with torch.device("meta"):
            built = build_encodings(pe, Shape.of(self.net.cfg, train_len))
        encodings = with_parameters_of(built, self.net.encodings)
        distributed.install_kernels(encodings, self.hardware)
        return encodings


def _variant(pe: dict[str, Any], scale: float, encodings: Encodings, *, zero_shot: bool) -> Variant:
    """Describe the `encodings` that read the weights."""
    label = pe["name"]
    # An infinite scale says only that the encoding reads any length.
    if len(scales_of(encodings)) > 1 and scale < math.inf:
        label += f" at scale {scale:g}"
    return Variant(label=label, pe=pe, scale=scale, zero_shot=zero_shot)


def _run_plan(plan: Plan, scorer: Scorer) -> tuple[list[PartResult], list[int]]:
    """Return the results of a measure, and the lengths that are skipped because the encoding ends before them."""
    max_len = max_len_of(scorer.encodings or scorer.net.encodings) or math.inf  # None: they read any length
    skipped = {part.length for part in plan.parts if part.length > max_len}
    measured: list[PartResult] = []
    for part in plan.parts:
        if part.length not in skipped:
            measured += part.run(scorer)
    return measured, sorted(skipped)
