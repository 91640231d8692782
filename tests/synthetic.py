"""Run directories with made-up numbers, written through the classes that write real ones.

The bits of a text are level(encoding, length) + what the text adds + what the seed adds + noise. Seeds and texts add
the same to every encoding, as in real runs, which share data and initial weights.
"""

import functools
import json
import math
from contextlib import contextmanager

import numpy as np
import yaml
from conftest import pe_options

from ropewalk.app.init_from import train_values
from ropewalk.evaluation.results import Evaluation, Measured, Variant

LENGTHS = (128, 256, 512, 1024, 2048)
TRAIN_LEN, STEPS, TEXTS = 256, 600, 24
# bits per byte at train_len, what each doubling up to there gains, and what each beyond adds
LEVELS = {
    "rope": (2.05, 0.05, 0.7), "alibi": (2.20, 0.0, 0.0), "cope": (2.06, 0.03, 0.04), "fox": (2.07, 0.05, -0.03),
    "nope": (2.9, 0.1, 0.2), "yarn": (2.40, 0.02, 0.01), "rerope": (2.06, 0.05, 0.005),
}  # fmt: skip
FAR = {"rope": 0.1, "alibi": 0.0, "cope": 0.6, "fox": 0.95, "yarn": 0.8, "rerope": 0.9, "nope": 0.2}  # of keys, found
PROVENANCE = {
    "command": "python train.py", "commit": "0123456789abcdef", "dirty": False, "diff_sha256": None, "device": "cpu",
    "precision": "32-true", "time": "2026-01-01T00:00:00+00:00", "torch": "2.13.0", "processor": "a processor",
}  # fmt: skip
TRAINING = {
    "steps": STEPS, "tokens": STEPS * 4096, "seconds": 273.0, "tokens_per_s": 9000.0, "device": "cpu",
    "parameters": {"total": 820_480}, "flops_per_token": 10**6, "precision": "32-true", "peak_memory_mb": 99.0,
    "validation": {"loss": 1.4, "bits_per_byte": 2.0, "error": None, "tokens": 65_536, "length": TRAIN_LEN},
}  # fmt: skip


def level(encoding, length):
    start, gain, slope = LEVELS[encoding]
    return start + (slope if length > TRAIN_LEN else -gain) * math.log2(length / TRAIN_LEN)


def options(pe, **more):
    try:
        return pe_options(pe) | more
    except FileNotFoundError:  # an encoding of a user's own
        return {"name": pe, "_target_": f"plugin.{pe}"} | more


@functools.cache
def usual_values():
    return train_values()


def write_run(
    folder, pe="rope", seed=0, *, name=None, task=None, identity="a", config=None, pe_more=None, finished=True, **found
):
    """A run, its `config` as {"optim.lr": 1.0}; if it is finished, with what `evaluate` writes for `found`."""
    run = folder / (name or f"{pe}-{task or 'code'}" + (f"-s{seed}" if seed else ""))
    run.mkdir(parents=True)
    given = {
        "seed": seed, "name": run.name, "runs_dir": str(folder), "overwrite": False, "train_len": TRAIN_LEN,
        "init_from": None, "pe": options(pe, **(pe_more or {})), "model": {"n_layer": 2, "n_head": 4, "dim": 128},
        "data": {"name": task or "code"}, "optim": {"lr": 0.002}, "logger": {"kind": "none"},
        "trainer": {"max_steps": STEPS, "log_every": 10, "checkpoint_every": 100, "devices": 1},
        "eval": {"lengths": [0.5, 1, 2, 4, 8], "tolerance": 0.02},
    }  # fmt: skip
    values = usual_values() | given
    for section in ("model", "optim", "trainer", "eval"):
        values[section] = usual_values()[section] | given[section]
    for key, value in (config or {}).items():
        section, _, last = key.rpartition(".")
        (values[section] if section else values)[last] = value
    (run / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (run / "data.json").write_text(json.dumps({"sha256": task or identity}))
    if finished:
        (run / "training.json").write_text(json.dumps(TRAINING))
        evaluate(run, values, task, **found)
    return run


def evaluate(run, values, task=None, *, variants=(), kinds=("lengths",), skipped=(), step=STEPS, settings=None, **more):
    """Results of a run; `variants` are names, or (name, options), of what reads it zero-shot at scale 8."""
    ways = [(values["pe"]["name"], values["pe"], 1.0, False)]
    for variant in variants:
        name, other = variant if isinstance(variant, tuple) else (variant, {})
        ways.append((f"{name} at scale 8", options(name, scale=8.0, **other), 8.0, True))
    for label, pe, scale, zero_shot in ways:
        for kind in kinds:
            rng = np.random.default_rng([values["seed"], *label.encode()])
            Evaluation(
                kind=kind, run=run.name, run_id=run.name, seed=values["seed"], train_len=TRAIN_LEN, task=task,
                step=step, variant=Variant(label=label, pe=pe, scale=scale, zero_shot=zero_shot), skipped=list(skipped),
                eval={"sequences": TEXTS, "lengths": list(LENGTHS), "texts": "abc"} | (settings or {}),
                measured=list(measured(kind, pe["name"], values["seed"], task, skipped, rng, **more)),
                provenance=PROVENANCE,
            ).save(run / "evals")  # fmt: skip


@contextmanager
def edited(path):
    """The values of a results file, to change. It has no checksum after that, like files of older versions."""
    values = json.loads(path.read_text())
    yield values
    values.pop("checksum", None)
    path.write_text(json.dumps(values))


def measured(kind, encoding, seed, task, skipped, rng, worse=0.0, noise=0.02):
    """What one variant measured; `worse` is added to its level."""
    of_text = 0.3 * np.random.default_rng(1).standard_normal(TEXTS)
    of_seed = 0.05 * np.random.default_rng([2, seed]).standard_normal()
    far = FAR[encoding]

    def make(length, bits, errors=0, gain=None, size=64, **part):
        values = (bits + worse + of_text + of_seed + noise * rng.standard_normal(TEXTS)) * size * math.log(2)
        baseline = None if gain is None else (values + gain * size * math.log(2)).tolist()
        counts = (np.full(TEXTS, x) for x in (size, 0 if task else size, errors))
        tokens, in_bytes, wrong = (x.tolist() for x in counts)
        lists = {"nats": values.tolist(), "tokens": tokens, "bytes": in_bytes, "errors": wrong}
        return Measured(length=length, **lists, baseline_nats=baseline, **part)

    lengths = [n for n in LENGTHS if n not in skipped]
    longest = max(lengths)
    if kind == "lengths":
        for i, difficulty in enumerate(("dense", "sparse") if task else (None,)):
            for n in lengths:
                share = (0.002 + 0.1 * i * (1 - far)) * max(0, math.log2(n / TRAIN_LEN))
                wrong = rng.binomial(64, share, TEXTS)
                yield make(n, level(encoding, n), errors=wrong, task=task or "text", difficulty=difficulty)
    elif kind == "by_position":
        for start in range(0, longest, longest // 32):
            zigzag = 0.3 * math.sin(start)  # of the texts
            yield make(longest, level(encoding, start + 32) + zigzag, span=(start, start + longest // 32 - 1))
    elif kind == "far_copies":
        for octave in range(4, int(math.log2(longest))):
            gain = (far if 2**octave >= TRAIN_LEN else 0.0) + 0.05 * rng.standard_normal(TEXTS)
            yield make(longest, 1.0, gain=gain, span=(2**octave, 2 ** (octave + 1) - 1))
    elif kind == "reach":
        for distance in (32, 64, 128, 256, 512, 1024):
            values = 100 * far * distance**-0.3 + rng.standard_normal(TEXTS)
            for name in ("attention", "gradient", "attention in layer 1"):
                yield make(longest, 1.0, difficulty=name, span=(distance, longest - 1), reach=values.tolist())
    elif kind == "ruler":
        for depth, n in ((depth, n) for depth in (0.0, 0.5, 1.0, None) for n in lengths):
            share = far if (1 - (depth or 0)) * n >= TRAIN_LEN else 1.0
            missed = (rng.random(TEXTS) >= share).astype(int)
            gain = 10 * share + rng.standard_normal(TEXTS)
            yield make(n, 2.0, missed, gain, size=6, task="vt" if depth is None else "niah_single", depth=depth)
