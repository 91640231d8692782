"""Run directories with made-up numbers, written through the classes that write real ones.

The bits of a text are level(encoding, length) + what the text adds + what the seed adds + noise. Seeds and texts add
the same to every encoding, as in real runs, which share data and initial weights.
"""

import copy
import functools
import json
import math
from contextlib import contextmanager

import numpy as np
import yaml
from conftest import pe_options

from ropewalk.app.configure import train_values
from ropewalk.evaluation.results import Evaluation, PartResult, Variant

LENGTHS = (128, 256, 512, 1024, 2048)
TRAIN_LEN = 256
STEPS = 600
TEXTS = 24
SIZES = 40 + 13 * np.arange(TEXTS) % 50  # tokens and bytes of each text that are scored
DOCUMENTS = [text % 11 for text in range(TEXTS)]
# Bits per byte at train_len, what each doubling up to there gains, and what each beyond adds.
LEVELS = {
    "rope": (2.05, 0.05, 0.7),
    "alibi": (2.20, 0.0, 0.0),
    "cope": (2.06, 0.03, 0.04),
    "fox": (2.07, 0.05, -0.03),
    "nope": (2.9, 0.1, 0.2),
    "yarn": (2.40, 0.02, 0.01),
    "rerope": (2.06, 0.05, 0.005),
}
# The share of keys far back that is found.
FAR = {
    "rope": 0.1,
    "alibi": 0.0,
    "cope": 0.6,
    "fox": 0.95,
    "nope": 0.2,
    "yarn": 0.8,
    "rerope": 0.9,
}
PROVENANCE = {
    "command": "python train.py",
    "commit": "0123456789abcdef",
    "dirty": False,
    "diff_sha256": None,
    "device": "cpu",
    "precision": "32-true",
    "time": "2026-01-01T00:00:00+00:00",
    "torch": "2.13.0",
    "processor": "a processor",
}
TRAINING = {
    "steps": STEPS,
    "tokens": STEPS * 4096,
    "seconds": 273.0,
    "tokens_per_s": 9000.0,
    "device": "cpu",
    "parameters": {"total": 820_480},
    "flops_per_token": 10**6,
    "precision": "32-true",
    "peak_memory_mb": 99.0,
    "validation": {
        "loss": 1.4,
        "bits_per_byte": 2.0,
        "error": None,
        "tokens": 65_536,
        "length": TRAIN_LEN,
    },
}


def level(encoding, length):
    start, gain, slope = LEVELS[encoding]
    doublings = math.log2(length / TRAIN_LEN)
    return start + (slope if doublings > 0 else -gain) * doublings


@functools.cache
def usual_values():
    return train_values()


def write_run(folder, pe="rope", seed=0, *, name=None, task=None, identity="a", config=None, finished=True, **found):
    """A run, its `config` as {"optim.lr": 1.0}; if it is finished, with what `evaluate` writes for `found`."""
    data = task or "code"
    suffix = f"-s{seed}" if seed else ""
    run = folder / (name or f"{pe}-{data}{suffix}")
    run.mkdir(parents=True)
    values = copy.deepcopy(usual_values())
    given = {
        "seed": seed,
        "name": run.name,
        "runs_dir": str(folder),
        "train_len": TRAIN_LEN,
        "pe": pe_options(pe),
        "data": {"name": data},
        "trainer.max_steps": STEPS,
    }
    for key, value in (given | (config or {})).items():
        section, _, last = key.rpartition(".")
        place = values[section] if section else values
        place[last] = value
    (run / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (run / "data.json").write_text(json.dumps({"sha256": task or identity}))
    if finished:
        (run / "training.json").write_text(json.dumps(TRAINING))
        evaluate(run, task=task, **found)
    return run


def write_runs(folder, *encodings, seeds=(0,), **options):
    """A run of each encoding and seed."""
    for seed in seeds:
        for pe in encodings:
            write_run(folder, pe, seed, **options)


def evaluate(
    run, config=None, *, task=None, variants=(), kinds=("lengths",), step=STEPS, settings=None, noise=0.02, falls=None
):
    """Results of a run, or of another `config`; `variants` are names, or (name, options), that read it at scale 8."""
    values = yaml.safe_load((run / "config.yaml").read_text()) | (config or {})
    pe = values["pe"]
    readings = [Variant(label=pe["name"], pe=pe, scale=1.0, zero_shot=False)]
    for variant in variants:
        name, other = variant if isinstance(variant, tuple) else (variant, {})
        options = pe_options(name, scale=8.0, **other)
        readings.append(Variant(label=f"{name} at scale 8", pe=options, scale=8.0, zero_shot=True))
    seed = values["seed"]
    for reading in readings:
        for kind in kinds:
            rng = np.random.default_rng([seed, *reading.label.encode()])
            Evaluation(
                kind=kind,
                run=run.name,
                run_id=run.name,
                seed=seed,
                train_len=values["train_len"],
                task=task,
                step=step,
                variant=reading,
                eval={"sequences": TEXTS, "lengths": list(LENGTHS), "texts": "abc"} | (settings or {}),
                measured=list(MEASURES[kind](reading.pe["name"], task, texts_of(seed, noise, falls, rng))),
                provenance=PROVENANCE,
            ).save(run / "evals")


@contextmanager
def edited(path):
    """The values of a results file, or of the only one of a run, to change: without a checksum, like old files."""
    if path.is_dir():
        (path,) = path.glob("evals/*.json")
    values = json.loads(path.read_text())
    yield values
    values.pop("checksum", None)
    path.write_text(json.dumps(values))


def texts_of(seed, noise, falls, rng):
    """A function that makes texts of some bits per byte; with a gain, also what they have without the text before.

    The best possible predictor has a bit at one token, and `falls` less at each doubling; None: it is not known.
    """
    of_text = 0.3 * np.random.default_rng(1).standard_normal(TEXTS)
    of_seed = 0.05 * np.random.default_rng([2, seed]).standard_normal()
    nats_of_bit = SIZES * math.log(2)

    def make(length, bits, gain=None, errors=None, **part):
        own = noise * rng.standard_normal(TEXTS)
        nats = (bits + of_text + of_seed + own) * nats_of_bit
        lists = {"nats": nats, "tokens": SIZES, "bytes": SIZES, "errors": np.zeros(TEXTS, int)}
        if gain is not None:
            noisy = gain + 0.05 * rng.standard_normal(TEXTS)
            lists["baseline_nats"] = nats + noisy * nats_of_bit
        if falls is not None:
            lists["optimum_nats"] = (1 - falls * math.log2(length)) * nats_of_bit
        if errors is not None:
            lists["errors"] = errors
        in_files = {name: values.tolist() for name, values in lists.items()}
        return PartResult(length=length, documents=DOCUMENTS, **in_files, **part)

    return make


def lengths(encoding, task, make):
    for difficulty in ("dense", "sparse") if task else (None,):
        for length in LENGTHS:
            yield make(length, level(encoding, length), task=task or "text", difficulty=difficulty)


def by_position(encoding, task, make):
    width = LENGTHS[-1] // 32
    for start in range(0, LENGTHS[-1], width):
        yield make(LENGTHS[-1], level(encoding, start + width), span=(start, start + width - 1))


def far_copies(encoding, task, make):
    for distance in (32, 64, 128, 256, 512, 1024):
        gain = FAR[encoding] if distance >= TRAIN_LEN else 0.0
        yield make(LENGTHS[-1], 1.0, gain, span=(distance, 2 * distance - 1))


def ruler(encoding, task, make):
    for depth in (0.0, 0.5, 1.0):
        for length in LENGTHS:
            is_far = (1 - depth) * length >= TRAIN_LEN
            found = FAR[encoding] if is_far else 1.0
            missed = (np.arange(TEXTS) >= found * TEXTS).astype(int)
            yield make(length, 2.0, found, missed, task="niah_single", depth=depth)


MEASURES = {
    "lengths": lengths,
    "by_position": by_position,
    "far_copies": far_copies,
    "ruler": ruler,
}
