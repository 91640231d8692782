"""Say whether an engine computes the RoPE that was configured, and if not, what it does instead.

python -m ropecheck module:function         a function: (config, positions, kind of layer) -> (cos, sin)
python -m ropecheck transformers:CLASS       a model class of the installed transformers, such as LlamaForCausalLM
python -m ropecheck transformers:FOLDER      the model whose config.json is in a folder
python -m ropecheck http://HOST/v1/completions   a server that has loaded the tiny model
python -m ropecheck model:FOLDER             write the tiny model
python -m ropecheck vectors:FILE             write what all cases must give

Exit code: 0 right, 1 wrong, 2 it cannot be told.
"""

import argparse
import json
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from . import engines, tiny
from .rope import inv_freq, lengths, settings, turns

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
    q, k = np.random.RandomState(1).rand(2, 32) - 0.5
    products = (q[:16] + 1j * q[16:]) * (k[:16] - 1j * k[16:]) / np.sqrt(32)
    cases = []
    for name, config, kind in engines.CASES:
        numbers = {}
        for length in lengths(64):
            s = settings(config, kind, length)
            logits = tiny.logits(tiny.prompt(length), turns(s, range(length)))[-1]
            numbers[str(length)] = {
                "inv_freq": inv_freq(s).tolist(),
                "attention_factor": s["attention_factor"],
                "scores": ((turns(s, DISTANCES) @ products).real * s["attention_factor"]).tolist(),
                "logits": logits.round(4).tolist(),
            }
        cases.append({"name": name, "kind": kind, "config": config, "lengths": numbers})
    prompt = tiny.prompt(128)
    return {"q": q.tolist(), "k": k.tolist(), "distances": DISTANCES, "prompt": prompt, "cases": cases}


def main(arguments: list[str]) -> int:
    configs = {
        name if "rope_parameters" in config else f"{name}_v4": config
        for name, config, _ in engines.CASES
        if "layer_types" not in config
    }
    parser = argparse.ArgumentParser("ropecheck", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", type=lambda text: text.partition(":"), help="what to check, or model, or vectors")
    parser.add_argument(
        "--case", default="yarn", choices=configs, metavar="NAME", help=f"of the tiny model: {', '.join(configs)}"
    )
    parser.add_argument("--tolerance", type=float, help="of cos and sin (1e-4), or of a server in nats (0.05)")
    args = parser.parse_args(arguments)
    try:
        match args.target:
            case "model", _, folder:
                tiny.write(Path(folder), configs[args.case])
                return 0
            case "vectors", _, file:
                Path(file).write_text(json.dumps(golden(), separators=(",", ":")) + "\n")
                return 0
            case "http" | "https", _, _:
                lines = engines.check_server("".join(args.target), configs[args.case], args.tolerance or 0.05)
            case "transformers", _, name:
                lines = engines.check(engines.rotate, engines.of_transformers(name), args.tolerance or 1e-4)
            case _:
                lines = engines.check(resolve_name("".join(args.target)), engines.CASES, args.tolerance or 1e-4)
    except Exception as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        said = getattr(error, "read", bytes)()[:300].decode()  # by a server
        print(f"it cannot be told: {reason} {said}", file=sys.stderr)
        return 2
    print("\n".join(lines) or "right")
    return min(len(lines), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
