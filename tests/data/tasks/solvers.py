"""Each task solved from its symbols alone, read from left to right: nothing here knows the generators.

A solver takes the symbols a model reads and returns {position: the symbol that has to follow}.
"""

import re

from data.base import IGNORE_INDEX


def flip_flop(symbols):
    answers = {}
    memory = None
    for i, symbol in enumerate(symbols):
        if symbol == "r":
            answers[i] = memory
        elif symbol in ("0", "1") and symbols[i - 1] == "w":
            memory = symbol
    return answers


def selective_copy(symbols):
    separator = symbols.index("|")
    memory = [symbol for symbol in symbols[:separator] if symbol != "."]
    return {separator + i: symbol for i, symbol in enumerate(memory)}


def counting(symbols):
    values = {}
    for i, symbol in enumerate(symbols):
        if symbol == "pass":
            continue
        variable = symbol[0]
        match symbol[1:]:
            case "++":
                values[variable] += 1  # a KeyError if it was never set
            case "?":
                return {i: str(values[variable])}
            case assignment:
                values[variable] = int(assignment.removeprefix("="))
    raise AssertionError("no question")


def recall(symbols):
    answers = {}
    memory = {}
    text = " ".join(symbols).replace("a", "k") + " "  # an alias means its key
    for found in re.finditer(r"((?:k\d+ )+)((?:v\d+ )*)", text):
        key, values = found.groups()
        last = text[: found.end(1)].count(" ") - 1
        for i, symbol in enumerate(memory.get(key, [])):
            answers[last + i] = symbol
        memory.setdefault(key, values.split())
    return answers


def group(symbols, order):
    answers = {}
    state = None
    for i, symbol in enumerate(symbols[1:], start=1):
        if symbol.isdigit():
            state = str((int(state or 0) + int(symbol)) % order)
        else:
            before = state or "abcdef"[: len(symbol)]
            state = "".join(symbol["abcdef".index(letter)] for letter in before)
        answers[i] = state
    return answers


SOLVERS = {
    "flip_flop": flip_flop,
    "selective_copy": selective_copy,
    "copy": selective_copy,
    "counting": counting,
    "recall": recall,
    "group": group,
}


def texts(task, x, y):
    """Of each row of a batch the symbols that are read, and {position: the symbol that is to follow} where scored."""
    names = task.vocab
    for read, targets in zip(x.tolist(), y.tolist(), strict=True):
        symbols = [names[i] for i in read]
        answers = {at: names[i] for at, i in enumerate(targets) if i != IGNORE_INDEX}
        yield symbols, answers


def check(task, x, y):
    """Every scored label of a batch is what the solver finds, and exactly those tokens are scored."""
    is_group = task.task == "group"
    order = [task.vocab_size - 1] if is_group else []
    for symbols, answers in texts(task, x, y):
        assert answers == SOLVERS[task.task](symbols, *order), " ".join(symbols)
        if not is_group:  # what was to be predicted is then read
            following = dict(enumerate(symbols[1:]))
            assert answers | following == following | answers
