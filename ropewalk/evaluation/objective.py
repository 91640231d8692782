"""The number that a search minimises."""

from statistics import fmean

from ropewalk.evaluation.measures.lengths import length_settings
from ropewalk.evaluation.results import load_all
from ropewalk.run.directory import RunDir, read_training


def objective(run: RunDir) -> float:
    """Return the loss of a complete run that its `objective` names, of a task the error in percent.

    "validation" is the validation loss; a multiple of train_len the mean over the texts of that length, read by the
    run's own encoding, at its largest scale.
    """
    cfg = run.cfg
    if cfg.objective == "validation":
        return float(read_training(run.path)["validation"]["loss"])
    of_parts: dict[str, float] = {}  # of the difficulties of a task; text has one part
    for e in sorted(load_all(run.path), key=lambda e: e.variant.scale):
        is_own = (e.kind, e.step, e.variant.pe) == ("lengths", cfg.trainer.max_steps, cfg.pe)
        if is_own and length_settings(cfg).items() <= e.eval.items():
            of_length = [m for m in e.measured if m.length == round(cfg.objective * cfg.train_len)]
            of_parts |= {m.part: e.rows_of(m)[0]["value"] for m in of_length}
    return fmean(of_parts.values())
