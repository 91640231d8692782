"""The questions of RULER (Hsieh et al., arXiv 2404.06654), for small and base models, in any tokens.

Tasks, sentences and sizes are those of github.com/NVIDIA/RULER: scripts/data/synthetic/*.py and scripts/synthetic.yaml.
docs/log/released_models.md lists the differences. Each text has a twin that differs only in that the answer is wrong:
comparing the two tells retrieval from guessing.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice, pairwise
from string import ascii_uppercase
from textwrap import wrap
from typing import NamedTuple

import numpy as np

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SYLLABLES = [a + b for a in "bdfghjklmnprstvz" for b in "aeiou"]
Encode = Callable[[str], list[int]]


class Question(NamedTuple):
    """The parts of a text: the context, between an instruction and the question, grows with `n` units of filler."""

    instruction: str
    context: Callable[[int], str]  # n -> text
    question: str
    answer: str
    least: int = 0  # the smallest n for which the answer is defined

    def text(self, n: int) -> str:
        return self.instruction + self.context(n) + self.question + self.answer


def question(
    task: str, encode: Encode, length: int, seed: Sequence[int], *, depth: float = 0.0, twin: bool = False,
    essay: Sequence[str] = (NOISE,),
) -> tuple[list[int], int]:  # fmt: skip
    """Return the token ids of one text, with as many words or lines of filler as there is room for.

    Args:
        task: one of TASKS.
        encode: text -> token ids.
        length: tokens that the model reads; the text has at most `length` + 1.
        seed: of all random choices; texts with the same seed differ in length and depth alone.
        depth: of the needle that is asked for, in lines: 0 at the start of the context, 1 at its end. niah_* only.
        twin: make the text in which the answer is wrong.
        essay: lines that are repeated as the haystack of the tasks in ESSAYS.

    Returns:
        The token ids, and how many of them, at the end, are the answer.

    Raises:
        ValueError: there is no room for the task.
    """
    lines = essay if task in ESSAYS else [NOISE]
    parts = TASKS[task](np.random.default_rng(seed), length, depth, twin, lines)

    def tokens(n: int) -> int:
        return len(encode(parts.text(n)))

    if tokens(parts.least) > length + 1:
        takes = f"no room for {task}, which takes {tokens(parts.least) - 1}"
        raise ValueError(f"a text of {length} tokens has {takes}: raise eval.lengths, or leave it out of ruler.tasks")
    # The number of tokens depends on the tokenizer, so the largest n for which the text fits is searched for: double
    # the filler until it is too much, then bisect.
    too_much = parts.least
    while tokens(too_much) <= length + 1:
        too_much = 2 * too_much + 1
    n = bisect_right(range(parts.least, too_much), length + 1, key=tokens) + parts.least - 1
    # Tokens may join the question's end with the answer's start, so the answer is not encoded by itself.
    answer_tokens = len(encode(parts.question + parts.answer)) - len(encode(parts.question))
    return encode(parts.text(n)), answer_tokens


def essay_lines(text: str) -> tuple[str, ...]:
    """Sentences and lines of a text, cut where they are long, without the first, which may lack its beginning."""
    lines: list[str] = []
    for line in re.split(r"(?<=[.!?]) +|[\r\n]+", text):
        lines += wrap(line, 400)
    return tuple(lines[1:] or lines or [NOISE])


def _distinct(rng: np.random.Generator, n: int, alphabet: Sequence[str], size: int) -> list[str]:
    """`n` different words of `size` letters or syllables."""
    # A number of `size` digits in base len(alphabet) is a word, so different numbers give different words.
    numbers = rng.choice(len(alphabet) ** size, n, replace=False)
    digits = np.unravel_index(numbers, [len(alphabet)] * size, order="F")  # [size, n], the last digit of a number first
    return ["".join(letters) for letters in np.array([*alphabet])[np.stack(digits, axis=1)]]


def _haystack(lines: Sequence[str], needles: Sequence[str], depths: Sequence[float], n: int) -> str:
    """A text of `n` lines, with needles among them at depths from 0 to 1."""
    hay = list(islice(cycle(lines), n))
    # From the end, so that no insertion moves the place of the next one.
    for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
        hay.insert(round(depth * n), needle)
    return "\n".join(hay)


def _niah(
    rng: np.random.Generator, length: int, depth: float, twin: bool, lines: Sequence[str], *, keys: int, values: int
) -> Question:
    """Needles in a haystack: numbers of one or several keys. In the twin the answer belongs to another key, or none."""
    n = keys * values
    key, *other_keys = _distinct(rng, keys, SYLLABLES, 3)
    numbers = 10**6 + rng.choice(9 * 10**6, max(n, values + 1), replace=False)  # the first `values` are the answer
    hidden = numbers[:n]
    # In the twin each key has the next one's number, so the answer, numbers[0], is another key's or in no needle.
    if twin:
        hidden = np.roll(numbers, -1)[:n]
    owners = [key] * values + other_keys  # values == 1 if there are other keys
    needles = [f"One of the special magic numbers for {a} is: {b}." for a, b in zip(owners, hidden, strict=True)]

    # One number is asked for in the singular.
    some, number, are, are_all = "A", "number", "is", "is"
    if values > 1:
        some, number, are, are_all = "Some", "numbers", "are", "are all"

    subject = f"he special magic {number} for {key} mentioned in the provided text"
    first_answers = "".join(f" {x}," for x in numbers[1:values])
    return Question(
        f"{some} special magic {number} {are} hidden within the following text. Make sure to memorize it. I will quiz "
        f"you about the {number} afterwards.\n",
        partial(_haystack, lines, needles, [depth, *rng.random(n - 1)]),
        f"\nWhat {are_all} t{subject}? T{subject} {are}{first_answers}",
        f" {numbers[0]}",
    )


def _vt(rng: np.random.Generator, length: int, depth: float, twin: bool, lines: Sequence[str]) -> Question:
    """Variable tracking: a chain of four hops from a value. In the twin the variables have other names."""
    names = _distinct(rng, 10, ascii_uppercase, 5)
    value = rng.integers(10_000, 100_000)
    chain = names[5:] if twin else names[:5]
    needles = [f"VAR {chain[0]} = {value}"]
    needles += [f"VAR {b} = VAR {a}" for a, b in pairwise(chain)]
    return Question(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        partial(_haystack, lines, needles, sorted(rng.random(5))),
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are: "
        + " ".join(names[:4]),
        f" {names[4]}",
    )


def _cwe(rng: np.random.Generator, length: int, depth: float, twin: bool, lines: Sequence[str]) -> Question:
    """Common words: ten words of a list occur 30 times, the others 3 times. In the twin ten others are the common ones.

    In texts below 8,192 tokens (RULER: 4,096) they occur 6 times and once, since 30 times do not fit in so few bytes.
    """
    often, seldom = (30, 3) if length >= 8192 else (6, 1)
    words = _distinct(rng, 20 + length // (3 * seldom), SYLLABLES, 3)  # more than there is room for
    common, rare = words[:10], words[10:]
    if twin:
        common, rare = words[10:20], words[:10] + words[20:]
    # `context` is called for many n, and must give the same text for the same n: so the order has a seed of its own.
    order = rng.integers(2**32)

    def context(n: int) -> str:
        listed = np.random.default_rng(order).permutation(common * often + rare[:n] * seldom)
        return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))

    first_answers = "".join(f" {i}. {word}" for i, word in enumerate(words[:9], 1))
    return Question(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n",
        context,
        "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
        "often in the list are:" + first_answers + " 10.",
        f" {words[9]}",
        least=10,  # all of the other ten
    )


def _fwe(rng: np.random.Generator, length: int, depth: float, twin: bool, lines: Sequence[str]) -> Question:
    """Frequent words: the word of rank k makes up about k^-2 / zeta(2) of the text; the first is a row of dots.

    In the twin the words of ranks 2 to 4, which are the answers, and those of ranks 5 to 7 are exchanged.
    """
    words = _distinct(rng, max(length // 50, 7) - 1, SYLLABLES, 3)
    ranked = ["...", *words]
    if twin:
        ranked = ["...", *words[3:6], *words[:3], *words[6:]]
    share = np.arange(1.0, len(ranked) + 1) ** -2 / (math.pi**2 / 6)
    order = rng.integers(2**32)

    def context(n: int) -> str:
        times = (n * share).astype(int)
        return " ".join(np.random.default_rng(order).permutation(np.repeat(ranked, times)))

    return Question(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. ",
        context,
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
