"""Do counts fit probabilities? The samples are fixed, so a test that passes once always does."""

import math


def deviation(observed, expected):
    """Pearson's chi-squared of two lists of counts, as a number that is standard normal if the second is true.

    (Wilson and Hilferty's approximation.) Cells expected fewer than 5 times are merged with the next.
    """
    assert math.isclose(sum(observed), sum(expected), rel_tol=1e-6)
    cells = [(0.0, 0.0)]
    for o, e in sorted(zip(observed, expected, strict=True), key=lambda cell: cell[1]):
        cells[-1] = (cells[-1][0] + o, cells[-1][1] + e)
        if cells[-1][1] >= 5:
            cells.append((0.0, 0.0))
    rest = cells.pop()
    cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
    free = len(cells) - 1
    squared = sum((o - e) ** 2 / e for o, e in cells)
    return ((squared / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def fits(observed, probabilities):
    """Counts against probabilities, 1 in 3,000 of true ones failing."""
    n = sum(observed)
    total = math.fsum(probabilities)
    return deviation(observed, [n * p / total for p in probabilities]) < 3.4


def alike(counts, others):
    """Two lists of counts from one distribution, whichever it is; they are as many altogether."""
    assert sum(counts) == sum(others)
    expected = [(a + b) / 2 for a, b in zip(counts, others, strict=True)]
    # Each cell deviates by half of what it would from a true expectation, in both lists: together the same measure.
    scaled = [e + (a - e) * math.sqrt(2) for a, e in zip(counts, expected, strict=True)]
    return deviation(scaled, expected) < 3.4
