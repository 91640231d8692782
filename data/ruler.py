"""The questions of RULER (Hsieh et al., arXiv 2404.06654), for small and base models, in any tokens.

Tasks, sentences and sizes are those of github.com/NVIDIA/RULER: scripts/data/synthetic/*.py and scripts/synthetic.yaml.
What differs is told in docs/results.md. Each text has a twin in which the answer is wrong, but nothing else changes, to
tell retrieval from guessing.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from string import ascii_uppercase
from textwrap import wrap
from typing import NamedTuple

import numpy as np

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SYLLABLES = [a + b for a in "bdfghjklmnprstvz" for b in "aeiou"]
Encode = Callable[[str], list[int]]


class Question(NamedTuple):
    """A text in its parts: the context, between an instruction and the question, grows with `n` units of filler."""

    instruction: str
    context: Callable[[int], str]  # of n
    question: str
    answer: str
    least: int = 0  # n without which the answer would not be defined

    def text(self, n: int) -> str:
        return self.instruction + self.context(n) + self.question + self.answer


def question(
    task: str, encode: Encode, length: int, seed: Sequence[int], *, depth: float = 0.0, twin: bool = False,
    essay: Sequence[str] = (NOISE,),
) -> tuple[list[int], int]:  # fmt: skip
    """Token ids of one text, at most `length` + 1 of them, and how many of these, at the end, are the answer.

    As many words or lines stand in it as there is room for.

    Args:
        seed: of everything random; texts of one seed differ in length and depth alone.
        depth: of the needle that is asked for, in lines: 0 at the start of the context, 1 at its end; of niah_* alone.
        twin: make the text in which the answer is wrong.
        essay: lines that are repeated as the haystack of the tasks in ESSAYS.

    Raises ValueError: there is no room.
    """
    own = TASKS[task](np.random.default_rng(seed), length, depth, twin, essay if task in ESSAYS else [NOISE])

    def tokens(n: int) -> int:
        return len(encode(own.text(n)))

    least = more = own.least
    if tokens(least) > length + 1:
        takes = f"no room for {task}, which takes {tokens(least) - 1}"
        raise ValueError(f"a text of {length} tokens has {takes}: raise eval.lengths, or leave it out of ruler.tasks")
    while tokens(more) <= length + 1:
        more = 2 * more + 1
    n = bisect_right(range(least, more), length + 1, key=tokens) + least - 1
    return encode(own.text(n)), len(encode(own.question + own.answer)) - len(encode(own.question))


def essay_lines(text: str) -> tuple[str, ...]:
    """Sentences and lines of a text, cut where they are long, without the first, which may lack its beginning."""
    lines = [piece for line in re.split(r"(?<=[.!?]) +|[\r\n]+", text) for piece in wrap(line, 400)]
    return tuple(lines[1:] or lines or [NOISE])


def _distinct(rng: np.random.Generator, n: int, alphabet: Sequence[str], size: int) -> list[str]:
    """`n` different words of `size` letters or syllables."""
    drawn = rng.choice(len(alphabet) ** size, n, replace=False)
    places = np.unravel_index(drawn, [len(alphabet)] * size, order="F")  # of the letters: size arrays [n]
    return ["".join(alphabet[i] for i in letters) for letters in zip(*places, strict=True)]


def _haystack(lines: Sequence[str], needles: Sequence[str], depths: Sequence[float], n: int) -> str:
    """`n` lines, and needles among them at depths from 0 to 1."""
    hay = [lines[i % len(lines)] for i in range(n)]
    for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
        hay.insert(round(depth * n), needle)
    return "\n".join(hay)


def _niah(
    rng: np.random.Generator, length: int, depth: float, twin: bool, lines: Sequence[str], *, keys: int, values: int
) -> Question:
    """Needles in a haystack: numbers of one or several keys. In the twin another key, or none, has the number asked."""
    n = keys * values
    key, *others = _distinct(rng, keys, SYLLABLES, 3)
    numbers = 10**6 + rng.choice(9 * 10**6, max(n, values + 1), replace=False)
    told = np.roll(numbers, -twin)[:n]
    names = [key] * values + others  # values == 1 if there are others
    needles = [f"One of the special magic numbers for {a} is: {b}." for a, b in zip(names, told, strict=True)]
    a, number, are, are_all = ("Some", "numbers", "are", "are all") if values > 1 else ("A", "number", "is", "is")
    asked = f"the special magic {number} for {key} mentioned in the provided text"
    return Question(
        f"{a} special magic {number} {are} hidden within the following text. Make sure to memorize it. I will quiz you "
        f"about the {number} afterwards.\n",
        partial(_haystack, lines, needles, [depth, *rng.random(n - 1)]),
        f"\nWhat {are_all} {asked}? T{asked[1:]} {are}" + "".join(f" {x}," for x in numbers[1:values]),
        f" {numbers[0]}",
    )


def _vt(rng: np.random.Generator, length: int, depth: float, twin: bool, lines: Sequence[str]) -> Question:
    """Variable tracking: a chain of four hops from a value. In the twin the variables have other names."""
    names = _distinct(rng, 10, ascii_uppercase, 5)
    value = rng.integers(10_000, 100_000)
    chain = names[5:] if twin else names[:5]
    needles = [f"VAR {chain[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in pairwise(chain))]
    return Question(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        partial(_haystack, lines, needles, sorted(rng.random(5))),
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are: "
        + " ".join(names[:4]),
        f" {names[4]}",
    )


def _cwe(rng: np.random.Generator, length: int, depth: float, twin: bool, lines: Sequence[str]) -> Question:
    """Common words: ten of a list occur 30 times, the rest 3 times; 6 and 1 times in texts below 8,192 tokens (RULER:
    4,096), since 30 times do not fit in so few bytes. In the twin ten others are the common ones."""
    often, seldom = (30, 3) if length >= 8192 else (6, 1)
    words = _distinct(rng, 20 + length // (3 * seldom), SYLLABLES, 3)  # more than there is room for
    common, rare = (words[10:20], words[:10]) if twin else (words[:10], words[10:20])
    order = rng.integers(2**32)

    def context(n: int) -> str:
        listed = np.random.default_rng(order).permutation(common * often + (rare + words[20:])[:n] * seldom)
        return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))

    return Question(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n",
        context,
        "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
        "often in the list are:" + "".join(f" {i}. {word}" for i, word in enumerate(words[:9], 1)) + " 10.",
        f" {words[9]}",
        least=10,  # all of the other ten
    )


def _fwe(rng: np.random.Generator, length: int, depth: float, twin: bool, lines: Sequence[str]) -> Question:
    """Frequent words: the word of rank k occurs about k^-2 / zeta(2) of the time, the first is a row of dots. In the
    twin the ranks of the answers, 2 to 4, and the next three are exchanged."""
    words = _distinct(rng, max(length // 50, 7) - 1, SYLLABLES, 3)
    ranked = ["...", *(words[3:6] + words[:3] if twin else words[:6]), *words[6:]]
    share = np.arange(1.0, len(ranked) + 1) ** -2 / (math.pi**2 / 6)
    order = rng.integers(2**32)
    return Question(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. ",
        lambda n: " ".join(np.random.default_rng(order).permutation(np.repeat(ranked, (n * share).astype(int)))),
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        f"appeared words are: {words[0]}, {words[1]},",
        f" {words[2]}",
        least=81,  # so that the word of rank 7 occurs
    )


TASKS: dict[str, Callable[..., Question]] = {
    "niah_single": partial(_niah, keys=1, values=1),
    "niah_multikey": partial(_niah, keys=4, values=1),
    "niah_multivalue": partial(_niah, keys=1, values=4),
    "vt": _vt,
    "cwe": _cwe,
    "fwe": _fwe,
}
ESSAYS = ("niah_multikey", "niah_multivalue")  # tasks with sentences of documents as haystack; RULER's default
