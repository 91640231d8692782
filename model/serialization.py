"""A trained model on disk: weights as safetensors, architecture as JSON. No pickle, nothing executable."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from conf.files import announce, read_json, refuse_link, sealed, sha256, unsealed, write_bytes, write_json
from conf.schema import GPTConfig, parse, without_removed
from model import position
from model.gpt import GPT
from model.mix import CONV_OLD_NAME

FORMAT = 2
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"


def save(
    net: GPT, folder: str | Path, *, pe: dict[str, Any], tokenizer: dict[str, Any] | None = None,
    weights: dict[str, Tensor] | None = None, original_len: int | None = None,
) -> None:  # fmt: skip
    """Write model.safetensors and model.json, each at once or not at all.

    Args:
        pe: configuration of the position encoding.
        tokenizer: whatever identifies the tokenizer.
        weights: a state dict to write instead of that of `net`, whose own tensors may be shards.
        original_len: length in tokens of the longest text that these weights, or those that they were initialised from,
            were trained to read without a scaling; default train_len.
    """
    weights = weights or net.state_dict()
    tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    if net.cfg.tie_embeddings:  # one tensor under two names, which safetensors refuses
        del tensors["head.weight"]
    content = safetensors.torch.save(tensors, metadata={"format": "pt"})
    description: dict[str, Any] = {
        "format": FORMAT,
        "model": net.cfg.model_dump(),
        "pe": pe,
        "vocab_size": net.vocab_size,
        "train_len": net.train_len,
        "original_len": original_len or net.train_len,
        "tokenizer": tokenizer,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    # The weights first: a folder is a trained model once it has model.json, which names their hash.
    write_bytes(Path(folder) / WEIGHTS, content)
    write_json(Path(folder) / DESCRIPTION, sealed(description))


def describe(folder: str | Path) -> dict[str, Any]:
    """Return the contents of model.json.

    Raises:
        ValueError: it is missing, damaged, incomplete or of another format.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: has the run finished training? For a model of transformers write hf: before its name"
        )
    description = read_json(path)
    version = description.get("format")
    if version != FORMAT:
        raise ValueError(f"{path} has format {version!r}, but this version reads {FORMAT}: use the one that wrote it")
    try:
        is_sealed = "checksum" in description
        description = unsealed(description, remedy=": restore it")
        cfg = parse(GPTConfig, without_removed(description["model"], "model."))
        lengths = description["train_len"], description["original_len"]
        description |= {"model": cfg.model_dump(), "tokenizer": dict(description["tokenizer"] or {})}
        description["pe"]["name"] = str(description["pe"]["name"])
        # Building the encodings checks their options. On "meta" it takes no memory.
        with torch.device("meta"):
            position.build_encodings(description["pe"], position.Shape.of(cfg, lengths[0]))
            position.Shape.of(cfg, lengths[1])
    # The file may have been edited by hand: without a key, or with a value of any type under it.
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not is_sealed and lengths[0] != lengths[1]:
        announce(f"{path} is of an older version, without a checksum: its original_len={lengths[1]} is trusted")
    return description


def network(description: Mapping[str, Any], pe: Mapping[str, Any] | None = None) -> GPT:
    """Return the network that model.json describes, with initial weights; `pe`: an encoding instead of its own."""
    return GPT(
        parse(GPTConfig, description["model"]), pe or description["pe"], vocab_size=description["vocab_size"],
        train_len=description["train_len"],
    )  # fmt: skip


def load(folder: str | Path, *, pe: dict[str, Any] | None = None) -> GPT:
    """Return the model in `folder`, in evaluation mode.

    Args:
        pe: read the weights with this encoding instead of their own.

    Raises:
        ValueError: a file is missing or damaged, or the weights do not fit the architecture; names the tensors.
    """
    description = describe(folder)
    weights = read_weights(folder, description)
    # On "meta" the network takes no memory and draws no initial weights; then the tensors of the file become its own.
    with torch.device("meta"):
        net = network(description, pe)
    wrong = mismatched_tensors(net, weights)
    if wrong:
        raise ValueError(f"the weights in {folder} do not fit: {', '.join(wrong[:5])} differ in name or shape")
    net.load_state_dict(weights, assign=True)
    # Assigning gave head and embedding a parameter each.
    if net.cfg.tie_embeddings:
        net.head.weight = net.embedding.weight
    return net.eval()


def read_weights(folder: str | Path, description: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of the model in `folder`, under the names of `GPT.state_dict`.

    Args:
        description: what `describe` returned for this folder.

    Raises:
        ValueError: they cannot be read, are not those that model.json was written with, or are not all finite
            floating-point numbers.
    """
    path = refuse_link(Path(folder) / WEIGHTS)
    # model.json and the weights are two files. The hash tells whether they belong together, also where a folder was
    # copied while it was being written.
    try:
        weights = renamed(safetensors.torch.load_file(path))
        digest = sha256(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    if description.get("sha256") != digest:
        raise ValueError(f"{path} is damaged or belongs to another model: its SHA-256 is not that in {DESCRIPTION}")
    # Other weights would silently give NaN results.
    for name, tensor in weights.items():
        if not (tensor.is_floating_point() and tensor.isfinite().all()):
            raise ValueError(f"{path}: {name} ({tensor.dtype}) must hold finite floating-point numbers")
    # The file has tied weights once. If even the embedding is missing, `mismatched_tensors` reports the empty tensor.
    if description["model"]["tie_embeddings"]:
        weights["head.weight"] = weights.get("embedding.weight", torch.empty(0))
    return weights


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file under the names of this version.

    A checkpoint's names end in that of a moment, too.
    """
    return {name.replace(f"attn.{CONV_OLD_NAME}", "attn.mix.conv"): tensor for name, tensor in tensors.items()}


def mismatched_tensors(net: GPT, weights: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that only one of the two has, or that differ in shape."""
    expected = net.state_dict()
    wrong = expected.keys() ^ weights.keys()  # names that only one of the two has
    for name in expected.keys() & weights.keys():
        if expected[name].shape != weights[name].shape:
            wrong.add(name)
    return sorted(wrong)
