"""Our network written as a model of transformers."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from common.files import read_json, write_text
from model import serialization
from model.gpt import GPT
from model.hf import rope
from model.hf.architectures import ARCHITECTURES
from model.hf.read import library
from model.position import PositionEncoding
from model.position.absolute import Learned

GENERATION = "generation_config.json"
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
A {name} written by Ropewalk: position encoding {pe} at scale {scale:g}, trained at {train_len} tokens.

    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
"""


def export(
    run: str | Path, out: str | Path, *, scale: float | None = None, eos_token_id: int | None = None,
    tokenizer: Callable[[Path], None] | None = None,
) -> str:  # fmt: skip
    """Write a run's model as a folder that `AutoModelForCausalLM` opens; returns a line that names what was written.

    Its logits are ours, but for those of tokens that pad the vocabulary, which are left out. The folder is whole or not
    there, and has a model card.

    Args:
        scale: one of the encoding's scales; default the one it is trained at.
        eos_token_id: id of the token that ends a text.
        tokenizer: writes the files of the tokenizer into the folder; of a generation configuration among them all ends
            of a text are kept, if `eos_token_id` is one.

    Raises ValueError: `out` has files in it, the model cannot be read, or transformers cannot compute it; says why.
    """
    net, out, transformers = serialization.load(run), Path(out).absolute(), library()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: choose another, or remove it")
    scale = net.scales[0] if scale is None else scale
    if scale not in net.scales:
        raise ValueError(f"scale={scale:g} is none of the encoding's, {net.scales}: see pe.scale")
    described = serialization.describe(run)
    with net.at_scale(scale):
        config = _configuration(net, described["original_len"])
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model.load_state_dict(_weights(net, model.state_dict(), config), assign=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        folder = Path(temporary) / out.name
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:  # a full disk
            raise OSError(f"cannot write {out}: {error}") from None
        if tokenizer:
            tokenizer(folder)
        generation = read_json(folder / GENERATION)
        said, eos = generation.get("eos_token_id"), {"eos_token_id": eos_token_id}
        if eos_token_id is None or (isinstance(said, list) and eos_token_id in said):
            eos["eos_token_id"] = said
        write_text(folder / GENERATION, json.dumps(generation | eos, indent=2))
        values = read_json(folder / "config.json") | eos
        rotation = values.get("rope_parameters", {"rope_type": "learned positions"})
        if rope.FULL in rotation:
            values["rope_local_base_freq"], rotation = rotation[rope.SLIDING]["rope_theta"], rotation[rope.FULL]
        if "rope_theta" in rotation:  # other programs, and transformers before version 5, read these names
            values["rope_scaling"] = None if rotation["rope_type"] == "default" else rotation
            values |= {key: rotation[key] for key in ("rope_theta", "partial_rotary_factor") if key in rotation}
        write_text(folder / "config.json", json.dumps(values, indent=2))
        card = CARD.format(name=type(model).__name__, pe=described["pe"]["name"], scale=scale, train_len=net.train_len)
        write_text(folder / "README.md", card)
        folder.replace(out)
    return f"{type(model).__name__}, {rotation['rope_type']}"


def _configuration(net: GPT, reach: int) -> Any:
    """The configuration of the architecture that computes what `net`, trained to read `reach` tokens, computes.

    Raises ValueError: transformers has none; names what stands in the way.
    """
    cfg, pe = net.cfg, net.encodings[0]
    layers = [rope.Layer(pe.window, type(pe) is not PositionEncoding) for pe in net.encodings]
    windows = [layer.window for layer in layers if layer.window is not None]
    refused = {kind: arch.refused(cfg, net.encodings) for kind, arch in ARCHITECTURES.items()}
    # the fewest refusals; a kind of position that it lacks counts most
    kind = min(refused, key=lambda kind: (any(what.startswith("pe=") for what in refused[kind]), len(refused[kind])))
    arch, family, learned = ARCHITECTURES[kind], library().CONFIG_MAPPING[kind], kind == "gpt2"
    if what := " and ".join(refused[kind]):
        raise ValueError(f"this cannot be exported: the nearest model of transformers, {arch.name}, cannot have {what}")
    values = cfg.model_dump() | {"mlp": next(theirs for theirs, ours in arch.activations.items() if ours == cfg.mlp)}
    if not learned:
        values |= {"n_kv_head": cfg.kv_heads, "head_dim": cfg.head_width, "hidden_dim": cfg.hidden}
    fields = {theirs: values[ours] for ours, theirs in arch.settings.items()}
    # Left out, special tokens would get the numbers that they have in some famous tokenizer.
    fields |= {"vocab_size": net.vocab_size} | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    fields |= {"n_positions": pe.max_len} if learned else {"max_position_embeddings": reach}
    rotating = {} if learned else {pe: layer for pe, layer in zip(net.encodings, layers, strict=True) if layer.rotates}
    for pe, layer in sorted(rotating.items(), key=lambda item: item[1].window is None):  # the last ones' reach counts
        written = rope.write(pe, reach)
        if arch.rotates_by_kind:
            written["rope_parameters"] = {layer.kind: written["rope_parameters"]} | fields.get("rope_parameters", {})
        fields |= written
    said = {
        "sliding_window": max(windows, default=reach if kind == "gemma3_text" else None),  # which makes a mask of it
        "use_sliding_window": bool(windows),
        "layer_types": [layer.kind for layer in layers],
        "no_rope_layers": [int(layer.rotates) for layer in layers],
        "attention_bias": bool(cfg.bias),
        "mlp_bias": cfg.bias is True,
        "query_pre_attn_scalar": cfg.head_width,
    }
    fields |= {key: value for key, value in said.items() if hasattr(family, key)}
    try:
        config = family(**fields)
        if not learned and rope.layers(config) != layers:
            raise ValueError("it has no such pattern of encodings")
        for pe, layer in rotating.items():
            rope.check(pe, config, arch, layer)
    except Exception as error:  # the library raises many kinds
        raise ValueError(f"{arch.name} of transformers cannot compute this network: {error}") from None
    return config


def _weights(net: GPT, expected: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of `net` as the tensors `expected` of transformers; biases that it lacks are zero."""
    pe, arch = net.encodings[0], ARCHITECTURES[config.model_type]
    theirs = {name: torch.zeros(value.shape, dtype=net.embedding.weight.dtype) for name, value in expected.items()}
    for name, value in net.state_dict().items():
        if isinstance(pe, Learned) and name.endswith(".table"):  # the vectors of the positions it reaches at its scale
            positions = torch.arange(pe.max_len or 0, device=value.device)
            with torch.no_grad():
                value = pe.embed(value.new_zeros(len(positions), net.cfg.dim), positions)
        if name in ("embedding.weight", "head.weight"):
            value = value[: net.vocab_size]
        if arch.transposes(name):
            value = value.T
        shift, factor = arch.folded(config, name)
        value = value / factor - shift
        parts = [theirs[part] for part in arch.tensors(name)]
        for part, piece in zip(parts, value.split([part.size(0) for part in parts]), strict=True):
            part.copy_(piece)
    return theirs
