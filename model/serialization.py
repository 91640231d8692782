"""A trained model on disk: weights as safetensors, architecture as JSON. No pickle, nothing executable."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from common.files import atomic_write, read_json, refuse_link, write_json
from model import position
from model.gpt import GPT, parse_config

FORMAT = 2
WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"


def save(
    net: GPT, folder: str | Path, *, pe: dict[str, Any], tokenizer: dict[str, Any] | None = None,
    weights: dict[str, Tensor] | None = None, original_len: int | None = None,
) -> None:  # fmt: skip
    """Write model.safetensors and model.json, each at once or not at all.

    `pe` configures the position encoding, `tokenizer` is whatever identifies it, and `weights` is a state dict to write
    instead of that of `net`, whose own tensors may be shards. `original_len` is the longest text that these weights, or
    those they began with, were trained to read without a scaling; default train_len.
    """
    weights = net.state_dict() if weights is None else weights
    weights = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    if net.cfg.tie_embeddings:  # one tensor under two names, which safetensors refuses
        del weights["head.weight"]
    sizes = {"vocab_size": net.vocab_size, "train_len": net.train_len, "original_len": original_len or net.train_len}
    content = serialize(weights, metadata={"format": "pt"})
    about = {"tokenizer": tokenizer, "sha256": hashlib.sha256(content).hexdigest()}
    description = {"format": FORMAT, "model": net.cfg.model_dump(), "pe": pe, **sizes, **about}
    with atomic_write(Path(folder) / WEIGHTS) as file:
        file.write(content)
    write_json(Path(folder) / DESCRIPTION, description)


def describe(folder: str | Path) -> dict[str, Any]:
    """The contents of model.json. Raises ValueError if it is missing, damaged, incomplete or of another format."""
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        remedy = "has the run finished training? A model of transformers has hf: before its name"
        raise ValueError(f"{path} is missing: {remedy}")
    description = read_json(path)
    if (found := description.get("format")) != FORMAT:
        raise ValueError(f"{path} has format {found!r}, this version reads {FORMAT}: use the version that wrote it")
    try:
        cfg, pe = parse_config(description["model"]), description["pe"]
        sizes = {key: int(description[key]) for key in ("vocab_size", "train_len", "original_len")}
        if min(sizes.values()) < 1:
            raise ValueError(f"{', '.join(sizes)} must be at least 1")
        with torch.device("meta"):
            position.build_encodings(pe, position.Shape.of(cfg, sizes["train_len"]))
        about = {"pe": pe | {"name": str(pe["name"])}, "tokenizer": dict(description["tokenizer"] or {})}
        return description | {"model": cfg.model_dump()} | about | sizes
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:  # any type may stand there
        raise ValueError(f"{path} cannot be read: {error}") from None


def load(folder: str | Path, *, pe: dict[str, Any] | None = None) -> GPT:
    """The model in `folder`, in evaluation mode; with `pe` its weights are read with this encoding, not its own.

    Raises ValueError: a file is missing or damaged, or the weights do not fit the architecture; names the tensors.
    """
    found = describe(folder)
    weights = read_weights(folder, found)
    sizes = {key: found[key] for key in ("vocab_size", "train_len")}
    with torch.device("meta"):
        net = GPT(parse_config(found["model"]), pe or found["pe"], **sizes)
    if wrong := mismatched_tensors(net, weights):
        raise ValueError(f"the weights in {folder} do not fit: {', '.join(wrong[:5])} differ in name or shape")
    net.load_state_dict(weights, assign=True)
    if net.cfg.tie_embeddings:
        net.head.weight = net.embedding.weight
    return net.eval()


def read_weights(folder: str | Path, description: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of the model that `describe` found, under the names of `GPT.state_dict`.

    Raises ValueError if they cannot be read, or are not those that model.json was written with.
    """
    path = Path(folder) / WEIGHTS
    try:
        with refuse_link(path).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    if description.get("sha256") != found:
        raise ValueError(f"{path} is damaged or of another model: its SHA-256 is not that of {DESCRIPTION}")
    if description["model"]["tie_embeddings"]:
        weights["head.weight"] = weights.get("embedding.weight", torch.empty(0))
    return weights


def mismatched_tensors(net: GPT, weights: dict[str, Tensor]) -> list[str]:
    """Names of tensors that only one of the two has, or that have another shape."""
    expected = {name: value.shape for name, value in net.state_dict().items()}
    found = {name: value.shape for name, value in weights.items()}
    return sorted(name for name in expected | found if expected.get(name) != found.get(name))
