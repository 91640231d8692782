"""A first look: train a small RoPE model for a minute, read longer text with it, and let it write.

make demo

The weights are read as RoPE, as they were trained, and zero-shot as YaRN and ReRoPE: the same tokens of unseen files
after more and more text. Then each reading continues a text of three times the training length. Other keys are those
of train.py, as in make demo ARGS="trainer.max_steps=3000 name=longer"
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.demo")

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import ropewalk
from conf.schema import Config
from ropewalk.app.cli import program
from ropewalk.app.resolve import for_this_machine
from ropewalk.app.sweep import configure
from ropewalk.evaluation.measures.lengths import length_settings
from ropewalk.evaluation.results import load_all
from ropewalk.files import printable
from ropewalk.training import distributed
from ropewalk.training.hardware import tune
from train import train_on

CHARACTERS = 200  # that each reading writes
TEMPERATURE = 0.7
PROMPT = 3  # training lengths of text before it
BAR = 100  # characters for a bit
ABOUT = """
Trained on {0} tokens at a time, the model now reads longer texts, each way with the same weights:
bits per byte of the same tokens, and how much more (+) that is than after the text cut to {0} tokens.
"""


@program("demo")
def main(composed: DictConfig) -> None:
    cfg, hardware = for_this_machine(configure(composed))
    tune(hardware.device, deterministic=cfg.trainer.deterministic)
    with distributed.launch(cfg.trainer, hardware) as fabric:
        run = train_on(fabric, cfg, hardware).path
    variants: list[Any] = cfg.eval.variants or []
    readings = {pe["name"]: pe for pe in (cfg.pe, *variants)}
    lost = losses(run, cfg, list(readings))
    print(ABOUT.format(cfg.train_len))
    for (name, length), (bits, more) in lost.items():
        shown = round(more, 2) + 0.0  # adding 0 makes 0.0 of -0.0
        print(f"as {name:6} {length:5} tokens {bits:6.2f} {shown:+6.2f}  {'█' * round(BAR * more)}".rstrip())
    write(run, cfg, readings)
    longest = max(cfg.lengths)
    print(f"\n{verdict({name: lost[name, longest][1] for name in readings}, cfg.train_len, longest)}")
    print('For an encoding that gains from longer text: make train ARGS="data=markov pe=kerple"')


def losses(run: Path, cfg: Config, readings: Sequence[str]) -> dict[tuple[str, int], tuple[float, float]]:
    """{reading, length: bits per byte, and how much more that is than as trained at the training length}."""
    bits = {}
    for evaluation in load_all(run):
        if evaluation.kind == "lengths" and length_settings(cfg).items() <= evaluation.eval.items():
            for m in evaluation.measured:
                bits[evaluation.variant.pe["name"], m.length] = sum(m.nats) / math.log(2) / sum(m.bytes)
    cut = bits[readings[0], cfg.train_len]
    return {(name, n): (bits[name, n], bits[name, n] - cut) for name in readings for n in cfg.lengths}


def verdict(lost: Mapping[str, float], train_len: int, tokens: int) -> str:
    """Return a sentence about what each reading `lost`, in bits per byte, at the longest length of `tokens`.

    The first reading is the one as trained.
    """
    # As they are printed, so that readings which look equal count as equal. Adding 0 makes 0.0 of -0.0.
    rounded = {name: round(bits, 2) + 0.0 for name, bits in lost.items()}
    trained = next(iter(rounded))
    best = min(rounded, key=rounded.__getitem__)
    sentence = f"At {tokens} tokens the model loses {rounded[trained]:.2f} bits per byte as {trained}"
    if best != trained:
        sentence += f", and least as {best}: {rounded[best]:.2f}"
    if rounded[best] > 0:
        return f"{sentence}. Cutting the text to {train_len} tokens loses nothing."
    return f"{sentence}. Read so, it needs no cutting."


def write(run: Path, cfg: Config, readings: Mapping[str, Any]) -> None:
    """Print what each reading writes after a text that was kept from training."""
    tokens = PROMPT * cfg.train_len
    models = {name: ropewalk.load(run, pe=pe, cache_dir=cfg.data["cache_dir"]) for name, pe in readings.items()}
    data = models[cfg.pe["name"]].data
    data.prepare()
    texts = data.validation(tokens, 9 * tokens)
    inputs, _ = texts.batch(texts.n - 1, texts.n)  # of the standard library: within a function
    prompt = data.decode(inputs[0].tolist())
    print(f"\nAfter {tokens} tokens of an unseen file, of which this is the end:\n\n{prompt[-CHARACTERS:]}")
    print(f"\neach writes {CHARACTERS} characters.")
    for name, model in models.items():
        text = model.generate(prompt, CHARACTERS, temperature=TEMPERATURE)
        print(f"\nas {name}:\n{printable(text)[:CHARACTERS]}")
