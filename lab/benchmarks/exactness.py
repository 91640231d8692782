"""Whether each encoding is exact on this device: outputs and all gradients in 16 bit beside those in float64."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from lab.benchmarks.measure import Row
from model.position import Shape, build_encodings
from ropewalk.app import cli


def exactness(options: Any) -> Iterator[Row]:
    """Yield a row for each encoding, with kernels where there are any: the check of trainer.kernels.

    Raises SystemExit at the end, with code 1: one is not exact, or its check failed.
    """
    from lab.kernels.check import LIMIT, checked  # needs Triton

    shape = Shape(4 * options.head_dim, 4, 2, options.head_dim, train_len=256, n_layer=2)
    encodings = [cli.encoding(spec) for spec in options.encodings or cli.encoding_names()]
    built = [build_encodings(pe, shape) for pe in encodings]
    # Several at a time, since compilers take most of it, which then take longer.
    check = partial(checked, device=options.device, limit=10 * LIMIT)
    is_exact = True
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for pe, problem in zip(encodings, pool.map(check, built), strict=True):
            is_exact = is_exact and not problem
            yield {"": pe["name"], f"problem with {options.head_dim} channels": problem or "none"}
    if not is_exact:
        raise SystemExit(1)
