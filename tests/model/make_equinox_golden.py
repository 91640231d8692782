"""Records what equinox's RotaryPositionalEmbedding computes in JAX, for test_rotary.py.

Run it in an environment of its own: pip install jax equinox; python tests/model/make_equinox_golden.py
"""

import json
from pathlib import Path

import equinox
import jax
import numpy as np

LENGTH = 9  # tokens
SIZES = ((2, 10_000.0), (8, 10_000.0), (16, 500_000.0))  # (head_dim, base); equinox caches tables by head_dim alone


def record(head_dim: int, base: float) -> dict:
    x = np.sin(np.arange(LENGTH * head_dim, dtype=np.float32)).reshape(LENGTH, head_dim)
    rotated = equinox.nn.RotaryPositionalEmbedding(head_dim, theta=base)(jax.numpy.asarray(x))
    return {"head_dim": head_dim, "base": base, "x": x.tolist(), "rotated": np.asarray(rotated).tolist()}


if __name__ == "__main__":
    golden = {
        "equinox": equinox.__version__,
        "jax": jax.__version__,
        "cases": [record(*size) for size in SIZES],
    }
    out = Path(__file__).with_name("golden") / "equinox_rotary.json"
    out.write_text(json.dumps(golden) + "\n")
