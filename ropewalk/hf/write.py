"""Writing our network as a model of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from model import serialization
from model.gpt import GPT
from model.position import PositionEncoding
from model.position.absolute import Learned
from model.position.network import at_scale, scales_of
from ropewalk.files import read_json, whole_folder, write_text
from ropewalk.hf import rope, selftest
from ropewalk.hf.architectures import ARCHITECTURES, Architecture
from ropewalk.hf.read import library

GENERATION = "generation_config.json"
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
A {name} written by Ropewalk: position encoding {pe} at scale {scale:g}, trained at {train_len} tokens.

    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)

selftest.json has log-probabilities by which Ropewalk's scripts/selftest.py checks whether a program reads it so.
"""


def export(
    run: str | Path, out: str | Path, *, scale: float | None = None, eos_token_id: int | None = None,
    tokenizer: Callable[[Path], None] | None = None,
) -> str:  # fmt: skip
    """Write a run's model as a folder that `AutoModelForCausalLM` opens.

    It computes the same logits, without those of the tokens that pad the vocabulary. The folder has a model card and a
    self-test (see `selftest`), and is either complete or not there.

    Args:
        run: directory of the run.
        out: the folder to write; it must not exist, or be empty.
        scale: one of the encoding's scales; default the one it is trained at.
        eos_token_id: id of the token that ends a text.
        tokenizer: writes the files of the tokenizer into the folder. If they include a generation configuration with
            several tokens that end a text, `eos_token_id` among them, all of these are kept.

    Returns:
        The class of the model and the kind of its positions, for a message.

    Raises:
        ValueError: `out` has files in it, the model cannot be read, or transformers cannot compute it (with the
            reason).
    """
    out = Path(out).absolute()
    library()  # raises if transformers is missing, before the model is read
    _refuse_used(out)
    net = serialization.load(run)
    scales = scales_of(net.encodings)
    scale = scales[0] if scale is None else scale
    if scale not in scales:
        raise ValueError(f"scale={scale:g} is none of the encoding's, {scales}: see pe.scale")
    description = serialization.describe(run)
    # A model of transformers has one scale: the active one goes into its settings.
    net.encodings = [*at_scale(net.encodings, scale, net.train_len)]
    model = _model(net, description["original_len"])
    name = type(model).__name__
    card = CARD.format(name=name, pe=description["pe"]["name"], scale=scale, train_len=net.train_len)

    with whole_folder(out) as folder:
        _refuse_used(out)  # another process may have written it meanwhile
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:  # a full disk
            raise OSError(f"cannot write {out}: {error}") from None
        # safetensors lets nobody but the owner read its files; the others of the folder follow the umask.
        mode = (folder / "config.json").stat().st_mode
        for weights in folder.glob("*.safetensors"):
            weights.chmod(mode)
        if tokenizer:
            tokenizer(folder)
        eos = _write_generation(folder, eos_token_id)
        positions = _write_config(folder, eos)
        write_text(folder / "README.md", card)
        selftest.write(folder, net, model.config)
        folder.replace(out)
    return f"{name}, {positions}"


def _refuse_used(out: Path) -> None:
    """Raise ValueError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: choose another, or remove it")


def _write_generation(folder: Path, eos_token_id: int | None) -> Any:
    """Complete the generation configuration; returns its tokens that end a text: an id, a list of ids, or None."""
    # The tokenizer's files may name several tokens that end a text. They stay if ours is one of them.
    generation = read_json(folder / GENERATION)
    eos = generation.get("eos_token_id")
    keep = eos_token_id is None or (isinstance(eos, list) and eos_token_id in eos)
    if not keep:
        eos = eos_token_id
    write_text(folder / GENERATION, json.dumps(generation | {"eos_token_id": eos}, indent=2))
    return eos


def _write_config(folder: Path, eos: Any) -> str:
    """Complete config.json with what other programs, and transformers before version 5, read; returns the rope type."""
    values = read_json(folder / "config.json")
    values["eos_token_id"] = eos
    # Version 5 has all rotary settings under rope_parameters; before it they stood at the top and in rope_scaling.
    rotation = values.get("rope_parameters", {"rope_type": "learned positions"})
    if rope.FULL in rotation:  # settings for each kind of layer
        values["rope_local_base_freq"] = rotation[rope.SLIDING]["rope_theta"]
        rotation = rotation[rope.FULL]
    if "rope_theta" in rotation:
        values["rope_scaling"] = None if rotation["rope_type"] == "default" else rotation
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rotation:
                values[key] = rotation[key]
    write_text(folder / "config.json", json.dumps(values, indent=2))
    return rotation["rope_type"]


def _model(net: GPT, reach: int) -> Any:
    """Return the model of transformers that computes what `net`, trained to read `reach` tokens, computes."""
    config = _configuration(net, _nearest_kind(net), reach)
    # Without memory of its own: the weights become its parameters.
    with torch.device("meta"):
        model = library().AutoModelForCausalLM.from_config(config)
    model.load_state_dict(_weights(net, model.state_dict(), config), assign=True)
    return model


def _nearest_kind(net: GPT) -> str:
    """Return the model_type that can have all settings of `net`.

    Raises:
        ValueError: none can; names the settings that stand in the way of the nearest.
    """
    refused = {kind: arch.refused(net.cfg, net.encodings) for kind, arch in ARCHITECTURES.items()}

    def badness(kind: str) -> tuple[bool, int]:
        """Rank an architecture: one that lacks the kind of positions is worse than one that lacks other settings."""
        lacks_positions = any(setting.startswith("pe=") for setting in refused[kind])
        return lacks_positions, len(refused[kind])

    nearest = min(refused, key=badness)
    if refused[nearest]:
        name = ARCHITECTURES[nearest].name
        settings = " and ".join(refused[nearest])
        raise ValueError(f"this cannot be exported: the nearest model of transformers, {name}, cannot have {settings}")
    return nearest


def _configuration(net: GPT, kind: str, reach: int) -> Any:
    """Return the configuration with which transformers computes what `net` computes, or raise ValueError."""
    arch = ARCHITECTURES[kind]
    layers = [rope.Layer(pe.window, type(pe) is not PositionEncoding) for pe in net.encodings]
    rotating: dict[PositionEncoding, rope.Layer] = {}
    fields = _sizes(net, kind)
    if kind == "gpt2":
        fields["n_positions"] = net.encodings[0].max_len
    else:
        rotating = {pe: layer for pe, layer in zip(net.encodings, layers, strict=True) if layer.rotates}
        fields |= _positions(rotating, arch, reach)

    family = library().CONFIG_MAPPING[kind]
    for key, value in _optional_settings(net, kind, layers, reach).items():
        if hasattr(family, key):
            fields[key] = value
    # Names of settings change their meaning between architectures and versions. So the layers and rotations that the
    # library derives from them are compared with the network's.
    try:
        config = family(**fields)
        if kind != "gpt2" and rope.layers(config) != layers:
            raise ValueError("it has no such pattern of encodings")
        for pe, layer in rotating.items():
            rope.check(pe, config, arch, layer)
    except Exception as error:  # the library raises many kinds
        raise ValueError(f"{arch.name} of transformers cannot compute this network: {error}") from None
    return config


def _sizes(net: GPT, kind: str) -> dict[str, Any]:
    """Return the settings that are only named differently in transformers."""
    cfg = net.cfg
    arch = ARCHITECTURES[kind]
    values = cfg.model_dump()
    values["mlp"] = next(theirs for theirs, ours in arch.activations.items() if ours == cfg.mlp)
    # Defaults that depend on other settings are written out. GPT-2 cannot have other heads than the default ones, and
    # takes None for the default width of its MLP, as we do.
    if kind != "gpt2":
        values |= {"n_kv_head": cfg.kv_heads, "head_dim": cfg.head_width, "hidden_dim": cfg.hidden}
    fields = {theirs: values[ours] for ours, theirs in arch.settings.items()}
    fields["vocab_size"] = net.vocab_size
    # If they were left out, special tokens would get the ids of the tokenizer that the architecture was trained with.
    return fields | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def _positions(rotating: dict[PositionEncoding, rope.Layer], arch: Architecture, reach: int) -> dict[str, Any]:
    """Return the rotary settings for the encodings that rotate."""
    fields: dict[str, Any] = {"max_position_embeddings": reach}
    by_kind: dict[str, Any] = {}
    # Layers without a window come last, so that the length they reach becomes that of the model.
    for pe, layer in sorted(rotating.items(), key=lambda item: item[1].window is None):
        fields |= rope.write(pe, reach)
        by_kind = {layer.kind: fields["rope_parameters"]} | by_kind
    if by_kind and arch.rotates_by_kind:
        fields["rope_parameters"] = by_kind
    return fields


def _optional_settings(net: GPT, kind: str, layers: list[rope.Layer], reach: int) -> dict[str, Any]:
    """Return settings that only some architectures have."""
    windows = [layer.window for layer in layers if layer.window is not None]
    window = max(windows, default=None)
    if window is None and kind == "gemma3_text":
        window = reach  # Gemma 3 builds a mask from it even if no layer has a window
    return {
        "sliding_window": window,
        "use_sliding_window": bool(windows),
        "layer_types": [layer.kind for layer in layers],
        "no_rope_layers": [int(layer.rotates) for layer in layers],
        "attention_bias": bool(net.cfg.bias),
        "mlp_bias": net.cfg.bias is True,
        "query_pre_attn_scalar": net.cfg.head_width,
    }


def _weights(net: GPT, expected: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Return the weights of `net` as the tensors `expected` by transformers; biases that `net` lacks are zero."""
    arch = ARCHITECTURES[config.model_type]
    dtype = net.embedding.weight.dtype
    theirs = {name: torch.zeros(value.shape, dtype=dtype) for name, value in expected.items()}
    for name, value in net.state_dict().items():
        if name.endswith(".table") and isinstance(net.encodings[0], Learned):
            value = _learned_positions(net.encodings[0], net.cfg.dim, value)
        if name in ("embedding.weight", "head.weight"):
            value = value[: net.vocab_size]
        if arch.transposes(name):
            value = value.T
        # The inverse of what `Pretrained.state_dict` does when it reads them.
        shift, factor = arch.folding(config, name)
        value = value / factor - shift
        parts = [theirs[part] for part in arch.tensors(name)]
        rows = [part.size(0) for part in parts]
        for part, piece in zip(parts, value.split(rows), strict=True):
            part.copy_(piece)
    return theirs


@torch.no_grad()
def _learned_positions(pe: Learned, dim: int, table: Tensor) -> Tensor:
    """Return the vectors [max_len, dim] of the positions that `pe` reaches at its scale."""
    # The encoding adds them to embeddings: to zeros, it returns the vectors themselves.
    positions = torch.arange(pe.max_len or 0, device=table.device)
    return pe.embed(table.new_zeros(len(positions), dim), positions)
