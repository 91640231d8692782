"""Writing our network as a model of transformers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.files import announce, read_json, whole_folder, write_json, write_text
from model.gpt import GPT
from model.position import PositionEncoding
from model.position.network import Encodings, at_scale, max_len_of, scales_of
from model.position.rotary import Rotary
from ropewalk.hf import rope
from ropewalk.hf.architectures import ARCHITECTURES, Architecture
from ropewalk.hf.read import library

GENERATION = "generation_config.json"
PERIOD = "sliding_window_pattern"
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
A {name} written by Ropewalk: position encoding {pe} at scale {scale:g}, trained at {train_len} tokens.

    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
"""


def export(
    net: GPT, description: Mapping[str, Any], out: str | Path, *, scale: float | None = None,
    bos_token_id: int | None = None, eos_token_id: int | None = None,
    tokenizer: Callable[[Path], None] | None = None,
) -> str:  # fmt: skip
    """Write a trained network as a folder that `AutoModelForCausalLM` opens.

    It computes the same logits, without those of the tokens that pad the vocabulary. The folder has a model card, and
    is either complete or not there.

    Args:
        description: of the network, as model.json has it (`model.serialization.describe`).
        out: the folder to write; it must not exist, or be empty.
        scale: one of the encoding's scales; default the one it is trained at.
        bos_token_id: id of the token that begins a text, if one does.
        eos_token_id: id of the token that ends a text.
        tokenizer: writes the files of the tokenizer into the folder. If they include a generation configuration with
            several tokens that end a text, `eos_token_id` among them, all of these are kept.

    Returns:
        The class of the model.

    Raises:
        ValueError: `out` has files in it, or transformers cannot compute it (with the reason).
    """
    out = Path(out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: choose another, or remove it")
    scales = scales_of(net.encodings)
    scale = scales[0] if scale is None else scale
    if scale not in scales:
        raise ValueError(f"scale={scale:g} is not one of the encoding's scales, {scales}: see pe.scale")
    # A model of transformers has one scale: the active one goes into its settings.
    model = _model(net, at_scale(net.encodings, scale), description["original_len"])
    name = type(model).__name__

    with whole_folder(out) as folder:
        model.save_pretrained(folder)
        if tokenizer:
            tokenizer(folder)
        _write_configs(folder, bos_token_id, eos_token_id)
        card = CARD.format(name=name, pe=description["pe"]["name"], scale=scale, train_len=net.train_len)
        note = _versions(read_json(folder / "config.json"))
        if note:
            card += f"\n{note}\n"
            announce(f"{out}: {note}")
        write_text(folder / "README.md", card)
        folder.replace(out)  # an error if another process has written it meanwhile
    return name


def _write_configs(folder: Path, bos_token_id: int | None, eos_token_id: int | None) -> None:
    """Complete config.json and GENERATION with what other programs, and transformers before version 5, look for."""
    generation = read_json(folder / GENERATION)
    # An id, a list of ids, or None. The tokenizer's files may name several; they stay if ours is one of them.
    ends = generation.get("eos_token_id")
    is_kept = eos_token_id is None or (isinstance(ends, list) and eos_token_id in ends)
    special_tokens = {"bos_token_id": bos_token_id, "eos_token_id": ends if is_kept else eos_token_id}
    write_json(folder / GENERATION, generation | special_tokens)

    values = read_json(folder / "config.json") | special_tokens
    # Version 5 has all rotary settings under rope_parameters; before it they stood at the top and in rope_scaling.
    rotation = values.get("rope_parameters", {})
    if rope.FULL in rotation:  # settings for each kind of layer
        values["rope_local_base_freq"] = rotation[rope.SLIDING]["rope_theta"]
        # The library has settings for a kind that no layer is of, too.
        rotation = rotation[rope.FULL if rope.FULL in values["layer_types"] else rope.SLIDING]
        values |= _period(values)
    if "rope_theta" in rotation:
        values["rope_scaling"] = None if rotation["rope_type"] == "default" else rotation
    values |= {key: rotation[key] for key in ("rope_theta", "partial_rotary_factor") if key in rotation}
    write_json(folder / "config.json", values)


def _period(values: dict[str, Any]) -> dict[str, int]:
    """What Gemma 3 had in the place of layer_types before 4.53: 6 if each sixth layer, and no other, has no window.

    Returns:
        Nothing if no number says it.
    """
    layer_types = values["layer_types"]
    full = [layer for layer, layer_type in enumerate(layer_types, start=1) if layer_type == rope.FULL]
    period = full[0] if full else len(layer_types) + 1
    multiples = list(range(period, len(layer_types) + 1, period))
    return {PERIOD: period} if full == multiples else {}


def _versions(values: dict[str, Any]) -> str:
    """Which versions of transformers read other layers than these out of config.json; "" if none that reads them.

    The file as written is asked, not the installed version.
    """
    types = set(values.get("layer_types", ()))
    if values["model_type"] == "olmo3":
        # Before 5 it had one base, and no scaling of layers with a window.
        full = values["rope_parameters"][rope.FULL]
        sliding = values["rope_parameters"][rope.SLIDING]
        plain = {"rope_type": "default", "rope_theta": full["rope_theta"]}
        if (len(types) > 1 and sliding != plain) or (types == {rope.SLIDING} and sliding["rope_type"] != "default"):
            return "Transformers before 5 rotates layers with a window differently: use a newer version."
    elif len(types) > 1 and PERIOD not in values:
        return "Transformers before 4.53 ignores layer_types: use a newer version."
    return ""


def _model(net: GPT, encodings: Encodings, trained_len: int) -> Any:
    """Return the model of transformers that computes what `net` does with `encodings`.

    Args:
        trained_len: tokens that `net` was trained to read without a scaling.

    Raises ValueError: no architecture can have all its settings; names those that the nearest one lacks.
    """
    refused = {model_type: arch.refused(net.cfg, net.encodings) for model_type, arch in ARCHITECTURES.items()}

    # The nearest lacks least. One that lacks the kind of positions is worse than one that lacks other settings.
    def badness(model_type: str) -> tuple[bool, int]:
        lacks_positions = any(key.startswith("pe=") for key in refused[model_type])
        return lacks_positions, len(refused[model_type])

    model_type = min(refused, key=badness)
    if refused[model_type]:
        raise ValueError(
            f"this cannot be exported: the nearest model of transformers, {ARCHITECTURES[model_type].name}, "
            f"cannot have {' and '.join(refused[model_type])}"
        )
    config = _configuration(net, encodings, model_type, trained_len)
    # Without memory of its own: the weights become its parameters.
    with torch.device("meta"):
        model = library().AutoModelForCausalLM.from_config(config)
    model.load_state_dict(_weights(net, encodings[0], ARCHITECTURES[model_type], model), assign=True)
    return model


def _configuration(net: GPT, encodings: Encodings, model_type: str, trained_len: int) -> Any:
    """Return the configuration with which transformers computes what `net` computes, or raise ValueError."""
    arch = ARCHITECTURES[model_type]
    layers = [rope.Layer(pe.window, isinstance(pe, Rotary)) for pe in encodings]
    rotating = {pe: layer for pe, layer in zip(encodings, layers, strict=True) if layer.rotates}
    family = library().CONFIG_MAPPING[model_type]
    # The positions of GPT-2 end at max_len. Rotations have no end.
    fields = _sizes(net, arch) | _positions(rotating, arch, max_len_of(encodings) or trained_len)

    settings = _settings_of_some(net, layers, trained_len if model_type == "gemma3_text" else None)
    fields |= {key: value for key, value in settings.items() if hasattr(family, key)}
    # Names of settings change their meaning between architectures and versions. So the layers and rotations that the
    # library derives from them are compared with the network's.
    try:
        config = family(**fields)
        if model_type != "gpt2" and rope.layers(config) != layers:
            raise ValueError("it has no such pattern of encodings")
        for pe, layer in rotating.items():
            rope.check(pe, config, arch, layer)
    except Exception as error:  # the library raises many kinds
        raise ValueError(f"{arch.name} of transformers cannot compute this network: {error}") from None
    return config


def _settings_of_some(net: GPT, layers: Sequence[rope.Layer], no_window: int | None) -> dict[str, Any]:
    """Return the settings that only some architectures have.

    Args:
        no_window: the width of windows that no layer has. Gemma 3 builds a mask from it, so there it is as long as any
            text.
    """
    windows = [layer.window for layer in layers if layer.window is not None]
    return {
        "sliding_window": max(windows, default=no_window),
        "use_sliding_window": bool(windows),
        "max_window_layers": 0,  # of Qwen: the first layer that may have a window
        "layer_types": [layer.layer_type for layer in layers],
        "no_rope_layers": [int(layer.rotates) for layer in layers],
        "attention_bias": bool(net.cfg.bias),
        "mlp_bias": net.cfg.bias is True,
        "query_pre_attn_scalar": net.cfg.head_width,
        "n_inner": net.cfg.hidden_dim,  # of GPT-2: None for the usual width, in place of the number in `_sizes`
    }


def _sizes(net: GPT, arch: Architecture) -> dict[str, Any]:
    """Return the settings that are only named differently in transformers, defaults written out."""
    cfg = net.cfg
    values = cfg.model_dump() | {
        "n_kv_head": cfg.kv_heads,
        "head_dim": cfg.head_width,
        "hidden_dim": cfg.hidden,
    }
    values["mlp"] = next(theirs for theirs, ours in arch.activations.items() if ours == cfg.mlp)
    fields = {theirs: values[ours] for ours, theirs in arch.settings.items()}
    fields["vocab_size"] = net.vocab_size
    # If they were left out, special tokens would get the ids of the tokenizer that the architecture was trained with.
    return fields | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def _positions(rotating: dict[PositionEncoding, rope.Layer], arch: Architecture, trained_len: int) -> dict[str, Any]:
    """Return the rotary settings for the encodings that rotate."""
    fields: dict[str, Any] = {"max_position_embeddings": trained_len}
    by_layer_type: dict[str, Any] = {}
    # Layers without a window come last, so that the length they reach becomes that of the model.
    for pe, layer in sorted(rotating.items(), key=lambda item: item[1].window is None):
        fields |= rope.write(pe, trained_len)
        by_layer_type = {layer.layer_type: fields["rope_parameters"]} | by_layer_type
    if by_layer_type and arch.by_layer_type:
        fields["rope_parameters"] = by_layer_type
    return fields


@torch.no_grad()
def _weights(net: GPT, pe: PositionEncoding, arch: Architecture, model: Any) -> dict[str, Tensor]:
    """Return the weights of `net` as the tensors of a `model` of transformers; biases that `net` lacks are zero.

    Args:
        pe: the encoding of the first layer, at the scale that is written. GPT-2 has learned positions, as a table.
    """
    dtype = net.embedding.weight.dtype
    theirs = {name: torch.zeros(value.shape, dtype=dtype) for name, value in model.state_dict().items()}
    for name, value in net.state_dict().items():
        if name.endswith(".table"):
            # The vectors [max_len, dim] of the positions that `pe` reaches: it adds them to embeddings, here zeros.
            positions = torch.arange(pe.max_len or 0, device=value.device)
            value = pe.embed(value.new_zeros(len(positions), net.cfg.dim), positions)
        if name in ("embedding.weight", "head.weight"):
            value = value[: net.vocab_size]
        arch.write(name, value, arch.parts(name, theirs), model.config)
    return theirs
