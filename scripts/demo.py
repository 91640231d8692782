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
from collections.abc import Mapping

from omegaconf import DictConfig
from rich.console import Console

import ropewalk
from conf.schema import Config
from model.position.network import for_length
from ropewalk.app.cli import program
from ropewalk.app.sweep import configure
from ropewalk.app.trained import variants
from ropewalk.evaluation.scoring import Scorer
from ropewalk.training import distributed
from ropewalk.training.hardware import Hardware, tune
from train import train_on

READINGS = {"rope": "red", "yarn": "green", "rerope": "blue"}  # with their colours
CHARACTERS = 200  # that each reading writes
TEMPERATURE = 0.7
PROMPT = 3  # training lengths of text before it
BAR = 100  # characters for a bit


@program("demo")
def main(composed: DictConfig) -> None:
    cfg = configure(composed)
    # Encodings that cannot read these weights are an error before the training, not after it.
    about = {"model": cfg.model.model_dump(), "pe": cfg.pe, "train_len": cfg.train_len, "original_len": cfg.train_len}
    readings = variants(about, READINGS, max(cfg.eval.lengths))
    t = cfg.trainer
    hardware = Hardware.resolve(accelerator=t.accelerator, precision=t.precision, compile=t.compile)
    tune(hardware.device, deterministic=t.deterministic)
    with distributed.launch(t, hardware) as fabric:
        run = train_on(fabric, cfg, hardware)
    models = {}
    for pe in readings:
        models[pe["name"]] = ropewalk.load(run.path, pe=pe, device=hardware.device, cache_dir=cfg.data["cache_dir"])
        models[pe["name"]].data.prepare()
    console = Console(highlight=False, soft_wrap=True)
    lost = read(models, cfg, console)
    write(models, cfg, console)
    console.print("\n" + verdict(lost, cfg.train_len, max(cfg.lengths)), soft_wrap=not console.is_terminal)
    hint = 'For an encoding that gains from longer text: make train ARGS="data=markov pe=kerple"'
    console.print(hint, soft_wrap=not console.is_terminal)


def read(models: Mapping[str, ropewalk.Model], cfg: Config, console: Console) -> dict[str, float]:
    """Print what each reading loses (+) or gains (-) at each length against cutting the text, once it is measured.

    Returns:
        {reading: bits per byte that it loses at the longest length}.
    """
    about = f"Trained on {cfg.train_len} tokens at a time, the model now reads longer texts, each way with the same "
    about += "weights: bits per byte of the same tokens, and how much more (+) that is than after the text cut "
    about += f"to {cfg.train_len} tokens."
    console.print(f"\n{about}\n", soft_wrap=not console.is_terminal)
    lost_at_longest = {}
    cut = math.nan
    for name, model in models.items():
        sets = model.data.eval_sets(cfg.lengths, target_tokens=cfg.target_tokens, sequences=cfg.eval.sequences)
        net = model.net
        for part in sets:
            encodings = for_length(net.encodings, part.length, net.train_len)
            sums = Scorer(net, encodings, token_bytes=model.data.token_bytes)(part)
            bits = sums.nats[:, 0].sum() / math.log(2) / sums.bytes.sum()
            if math.isnan(cut):  # the first reading, as trained, at the training length
                cut = bits
            lost = bits - cut
            bar = "█" * round(BAR * lost)
            console.print(f"as {name:6} {part.length:5} tokens {bits:6.2f} {lost:+6.2f}  [{READINGS[name]}]{bar}[/]")
        lost_at_longest[name] = lost
    return lost_at_longest


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


def write(models: Mapping[str, ropewalk.Model], cfg: Config, console: Console) -> None:
    """Print what each reading writes after a text that was kept from training."""
    tokens = PROMPT * cfg.train_len
    first, *_ = models.values()
    texts = first.data.validation(tokens, 9 * tokens)
    inputs, _ = texts.batch(texts.n - 1, texts.n)  # of the standard library: within a function
    prompt = first.data.decode(inputs[0].tolist())
    console.print(f"\nAfter {tokens} tokens of an unseen file, of which this is the end:\n")
    console.print(prompt[-CHARACTERS:], markup=False, style="dim")
    console.print(f"\neach writes {CHARACTERS} characters.")
    for name, model in models.items():
        console.print(f"\n[{READINGS[name]}]as {name}:[/]")
        left = CHARACTERS
        for piece in model.stream(prompt, CHARACTERS, temperature=TEMPERATURE):
            console.print(piece[:left], markup=False, end="")
            left -= len(piece)
            if left <= 0:
                break
        console.print()
