"""The losses of a run's own encoding, and the number that a search minimises."""

from statistics import fmean

from ropewalk.evaluation.measures.lengths import length_settings
from ropewalk.evaluation.results import Number, load_all
from ropewalk.run.directory import RunDir, read_training


def own_losses(run: RunDir) -> dict[int, dict[str, Number]]:
    """Return what the encoding of a run measured after its last step, by length in tokens and part of the measure.

    A scaled encoding reads up to the training length as it was trained, and longer texts at its largest scale. A length
    that the encoding is not defined for is missing.
    """
    cfg = run.cfg
    losses: dict[int, dict[str, Number]] = {}
    for e in sorted(load_all(run.path), key=lambda e: e.variant.scale):
        is_own = (e.kind, e.step, e.variant.pe) == ("lengths", cfg.trainer.max_steps, cfg.pe)
        if is_own and length_settings(cfg).items() <= e.eval.items():
            for m in e.measured:
                if m.length > cfg.train_len or not e.variant.zero_shot:
                    losses.setdefault(m.length, {})[m.part] = e.numbers_of(m)[0]
    return losses


def objective(run: RunDir) -> float:
    """Return the loss of a complete run that its `objective` names, of a task the error in percent.

    "validation" is the validation loss; a multiple of train_len the mean over the texts of that length, and of a task
    over its difficulties.
    """
    cfg = run.cfg
    if cfg.objective == "validation":
        return float(read_training(run.path)["validation"]["loss"])
    of_parts = own_losses(run)[round(cfg.objective * cfg.train_len)]
    return fmean(number["value"] for number in of_parts.values())
