"""The self-test of an export: log-probabilities of some tokens, and those of programs that ignore one of its settings.

Programs read configurations differently: a scaling, a base or a window that one does not know is often ignored without
a word. scripts/selftest.py compares what a program computes with these numbers, and names the fault that it finds.
"""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.gpt import GPT
from model.position.network import max_len_of
from ropewalk.files import write_json
from ropewalk.hf.read import library

FILE = "selftest.json"
USUAL_BASE = 10000.0  # of a program that does not find rope_theta
TARGETS = 64  # the last ones of each text
LONGEST = 2048  # tokens of a text, unless it takes more to go beyond the training length
# In nats a token: a fault that changes less is not told from rounding in 16 bit.
TELLING = 0.02


@torch.inference_mode()
def write(folder: Path, net: GPT, config: Any) -> None:
    """Write the self-test of `net` at its active scale into `folder`, which holds its weights for transformers.

    Args:
        config: the configuration of transformers in `folder`.
    """
    # A program computes in fp32 where it can, whatever the weights are stored in.
    net.float()
    tokens = {}
    right = {}
    texts: dict[str, dict[str, Any]] = {}
    for name, length in _lengths(net).items():
        text = _tokens(length, net.vocab_size)
        n = _targets(text)
        hidden = net.hidden_states(text[None])[0, -n - 1 : -1]
        values = _logprobs(net.head(hidden)[:, : net.vocab_size], text)
        tokens[name] = text
        right[name] = values
        texts[name] = {"name": name, "tokens": text.tolist(), "logprobs": _rounded(values), "faults": {}}
    # A fault is recorded for the texts in which it shows.
    for fault, faulty in _faulty(config).items():
        model = library().AutoModelForCausalLM.from_pretrained(folder, config=faulty, dtype=torch.float32)
        for name, text in tokens.items():
            logits = model(text[None], logits_to_keep=_targets(text) + 1).logits[0, :-1]
            values = _logprobs(logits, text)
            if (values - right[name]).abs().mean() > TELLING:
                texts[name]["faults"][fault] = _rounded(values)
    write_json(folder / FILE, {"texts": [*texts.values()]})


def _lengths(net: GPT) -> dict[str, int]:
    """Return the tokens of each text, by name."""
    longest = max_len_of(net.encodings) or max(LONGEST, net.train_len + TARGETS)
    lengths = {"as trained": min(net.train_len, LONGEST)}
    windows = [pe.window for pe in net.distinct_encodings if pe.window is not None]
    if windows:
        # Half of the targets lie beyond the edge of the window.
        lengths["across a window's edge"] = min(min(windows) + TARGETS // 2, longest)
    scale = max(pe.active_scale for pe in net.distinct_encodings)
    if 1 < scale < math.inf:
        lengths["at the scaled length"] = min(int(scale * net.train_len), longest)
    return lengths


def _tokens(length: int, vocab_size: int) -> Tensor:
    """Return tokens drawn at random, the first two fifths of them again and again, so that positions matter."""
    period = max(1, 2 * length // 5)
    drawn = torch.randint(vocab_size, (period,), generator=torch.Generator().manual_seed(length))
    return drawn.repeat(length // period + 1)[:length]


def _targets(tokens: Tensor) -> int:
    """Return the number of targets; the first token is none."""
    return min(TARGETS, len(tokens) - 1)


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of the last tokens, from the logits of each [targets, vocabulary]."""
    targets = tokens[-len(logits) :, None]
    return logits.float().log_softmax(-1).gather(1, targets)[:, 0]


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def _faulty(config: Any) -> dict[str, Any]:
    """Return configurations that ignore a setting of `config`, by the fault."""
    faults: dict[str, Any] = {}
    rotations = getattr(config, "rope_parameters", None) or {}
    # Settings for each kind of layer, or for all layers.
    by_kind = {kind: of_kind for kind, of_kind in rotations.items() if isinstance(of_kind, dict)}
    for fault, change in (("rope_scaling is ignored", _unscaled), ("rope_theta is lost", _usual_base)):
        changed = dict(rotations)
        for kind, of_kind in by_kind.items():
            changed[kind] = change(of_kind)
        if not by_kind:
            changed = change(rotations)
        if rotations and changed != rotations:
            faults[fault] = _with(config, rope_parameters=changed)
    if getattr(config, "sliding_window", None):
        # Wider than any text: setting it to None would change the kinds of layers in some architectures.
        faults["the sliding window is ignored"] = _with(config, sliding_window=2**30)
    return faults


def _unscaled(rotation: dict[str, Any]) -> dict[str, Any]:
    unscaled = {"rope_type": "default"}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rotation:
            unscaled[key] = rotation[key]
    return unscaled


def _usual_base(rotation: dict[str, Any]) -> dict[str, Any]:
    return rotation | {"rope_theta": USUAL_BASE}


def _with(config: Any, **changes: Any) -> Any:
    changed = copy.deepcopy(config)
    for key, value in changes.items():
        setattr(changed, key, value)
    return changed
