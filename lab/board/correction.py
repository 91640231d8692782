"""The correction of p-values for how many there are."""

from collections.abc import Sequence

import numpy as np


def holm(p_values: Sequence[float]) -> list[float]:
    """Return each p-value after Holm's correction for all (Scandinavian Journal of Statistics 6, 1979)."""
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    stepped = np.maximum.accumulate(factors * np.sort(p_values))
    return np.minimum(stepped, 1)[np.argsort(order)].tolist()
