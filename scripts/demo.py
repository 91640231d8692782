"""A first look: train a small RoPE model for a minute, and read longer text with it.

make demo

The weights are read as RoPE, as they were trained, and zero-shot as YaRN and ReRoPE: the same tokens of unseen files
after more and more text. Other keys are those of train.py, as in make demo ARGS="trainer.max_steps=3000 name=longer"
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.demo")

from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from conf.schema import Config, ConfigError
from ropewalk.app.cli import program
from ropewalk.app.resolve import for_this_machine
from ropewalk.app.sweep import configure
from ropewalk.evaluation.measures.lengths import length_settings
from ropewalk.evaluation.results import load_all, main_rows
from ropewalk.training import distributed
from ropewalk.training.hardware import tune
from train import train_on

ABOUT = """
Trained on {0} tokens at a time, the model now reads longer texts, each way with the same weights:
{2} of the same tokens, after {1} tokens of text.
"""


@program("demo")
def main(composed: DictConfig) -> None:
    cfg, hardware = for_this_machine(configure(composed))
    if cfg.train_len not in cfg.lengths:
        raise ConfigError(f"eval.lengths={cfg.eval.lengths} lacks the training length, to compare with: add 1")
    tune(hardware.device, deterministic=cfg.trainer.deterministic)
    with distributed.launch(cfg.trainer, hardware) as fabric:
        run = train_on(fabric, cfg, hardware).path
    if cfg.dry_run:
        return
    bits, unit = losses(run, cfg)
    print(ABOUT.format(cfg.train_len, ", ".join(map(str, cfg.lengths)), unit))
    print(bits.to_string(float_format="{:8.2f}".format))
    print(f"\n{verdict(bits, cfg.train_len, unit)}")
    print('For an encoding that gains from longer text: make train ARGS="data=markov pe=kerple"')


def losses(run: Path, cfg: Config) -> tuple[pd.DataFrame, str]:
    """The loss of each reading, the one as trained first, by length in tokens; and its unit."""
    bits = {}
    variants: list[Any] = cfg.eval.variants or []
    for evaluation in load_all(run):
        # The encoding itself counts as it was trained, and not at its other scales.
        wanted = variants if evaluation.variant.zero_shot else [cfg.pe]
        if evaluation.variant.pe in wanted:
            for (_, length), row in main_rows([evaluation], "lengths", length_settings(cfg)).items():
                bits[evaluation.variant.pe["name"], length] = row.sample.values.sum() / row.sample.units.sum()
                unit = row.unit
    readings = [pe["name"] for pe in (cfg.pe, *variants)]
    return pd.Series(bits).unstack().loc[readings, cfg.lengths], unit


def verdict(bits: pd.DataFrame, train_len: int, unit: str = "bits per byte") -> str:
    """Two sentences about what each reading loses at the longest length, against the text cut to `train_len`."""
    trained = bits.index[0]
    tokens = bits.columns[-1]
    # Of the numbers as they are printed, so that a reader finds the same. Adding 0 makes 0.0 of -0.0.
    printed = bits.round(2)
    lost = (printed[tokens] - printed[train_len][trained]).round(2) + 0.0
    best = lost.idxmin()
    loses = f"the model loses {lost[trained]:.2f} {unit} as {trained}, and least as {best}: {lost[best]:.2f}"
    end = f"Cutting the text to {train_len} tokens loses nothing" if lost[best] > 0 else "Read so, it needs no cutting"
    return f"At {tokens} tokens {loses}.\n{end}."
