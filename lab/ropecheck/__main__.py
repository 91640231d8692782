"""Say whether an engine computes the RoPE that was configured, and if not, what it does instead.

python -m ropecheck module:function         a function: (config, positions, kind of layer) -> (cos, sin)
python -m ropecheck transformers:CLASS       a model class of the installed transformers, such as LlamaForCausalLM
python -m ropecheck transformers:FOLDER      the model whose config.json is in a folder
python -m ropecheck http://HOST/v1/completions   a server that has loaded the tiny model
python -m ropecheck model FOLDER             write the tiny model
python -m ropecheck vectors FILE             write what all cases must give

Exit code: 0 right, 1 wrong, 2 it cannot be told.
"""

import argparse
import json
import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from . import engines, tiny
from .rope import inv_freq, settings, turns

DISTANCES = [0, 1, 2, 7, 63, 64, 127]


def golden() -> dict[str, Any]:
    """Return the golden vectors, for engines that are not checked from Python.

    Keys:
        q, k: a query and a key [D], in which channels i and i + D / 2 are a pair.
        distances: from the key to the query, in tokens.
        prompt: a text for the tiny model, of which shorter ones are the beginning.
        cases: for each configuration and kind of layer, by length of text, the inverse frequencies in radians per
            token, the attention factor, the scores q.k / sqrt(D) at the distances, and the tiny model's logits of the
            token that follows, all its layers being of this kind.
    """
    generator = random.Random(1)
    q, k = np.array([generator.random() - 0.5 for _ in range(64)]).reshape(2, 2, 16)  # [2, D / 2] each
    products = (q[0] + 1j * q[1]) * (k[0] - 1j * k[1]) / np.sqrt(32)
    cases = []
    for name, config, kind in engines.CASES:
        numbers = {}
        for length in engines.lengths(64):
            s = settings(config, kind, length)
            scores = (turns(s, DISTANCES) @ products).real * s["attention_factor"]
            logits = tiny.logits(tiny.prompt(length), turns(s, range(length)))[-1]
            numbers[str(length)] = {
                "inv_freq": inv_freq(s).tolist(),
                "attention_factor": s["attention_factor"],
                "scores": scores.tolist(),
                "logits": logits.round(4).tolist(),
            }
        cases.append({"name": name, "kind": kind, "config": config, "lengths": numbers})
    return {
        "q": q.ravel().tolist(),
        "k": k.ravel().tolist(),
        "distances": DISTANCES,
        "prompt": tiny.prompt(128),
        "cases": cases,
    }


def main(arguments: list[str]) -> int:
    configs = {name: config for name, config, _ in engines.CASES if "layer_types" not in config}
    parser = argparse.ArgumentParser("ropecheck", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("path", nargs="?", type=Path, help="what to write")
    parser.add_argument("--case", default="yarn", choices=configs, help="of the tiny model")
    parser.add_argument("--tolerance", type=float, help="of cos and sin (1e-4), or of a server in nats (0.05)")
    args = parser.parse_args(arguments)
    tolerance = {"tolerance": args.tolerance} if args.tolerance else {}
    kind, _, name = args.target.partition(":")
    lines = []
    try:
        if kind == "vectors":
            args.path.write_text(json.dumps(golden(), separators=(",", ":")) + "\n")
        elif kind == "model":
            tiny.write(args.path, configs[args.case])
        elif kind in ("http", "https"):
            lines = tiny.check(args.target, configs[args.case], **tolerance)
        elif kind == "transformers":
            lines = engines.check(*engines.of_transformers(name), **tolerance)
        else:
            lines = engines.check(getattr(import_module(kind), name), engines.CASES, **tolerance)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        print(f"it cannot be told: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines) or "right")
    return min(len(lines), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
