"""Our network written as a model of transformers."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import serialization
from model.files import read_json, write_text
from model.gpt import GPT, GPTConfig
from model.hf import rope
from model.hf.architectures import ACTIVATIONS, ARCHITECTURES, Architecture
from model.hf.read import GENERATION, copy_tokenizer, library
from model.position.absolute import Learned
from model.position.rotary import Rotary


def export(
    run: str | Path,
    out: str | Path,
    *,
    pe: dict[str, Any] | None = None,
    scale: float | None = None,
    eos_token_id: int | list[int] | None = None,
) -> str:
    """Write a run's model as a folder that `AutoModelForCausalLM` opens; returns a line that names what was written.

    Its logits are ours, but for those of tokens that pad the vocabulary, which are left out. The folder is whole or not
    there. The tokenizer files in run/tokenizer go with it.

    Args:
        out: must not exist, or be empty.
        pe: options of another encoding that reads the weights.
        scale: one of the encoding's scales; default the one it is trained at.
        eos_token_id: id, or ids, of the token that ends a text; default that of run/tokenizer.

    Raises:
        ValueError: `out` is not empty, the model cannot be read, or transformers cannot compute it; names the reason.
    """
    net = serialization.load(run, pe=pe)
    scale = net.scales[0] if scale is None else scale
    if scale not in net.scales:
        known = ", ".join(f"{scale:g}" for scale in net.scales)
        raise ValueError(f"scale={scale:g} is none of the encoding's, which are {known}: see pe.scale")
    with net.at_scale(scale):
        return write(net, Path(out), eos_token_id=eos_token_id, tokenizer=Path(run) / "tokenizer")


def write(net: GPT, out: Path, *, eos_token_id: int | list[int] | None = None, tokenizer: Path | None = None) -> str:
    """As `export`, for a network as it reads now."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: choose another, or remove it")
    transformers, config = library(), _configuration(net)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(_weights(net, model.state_dict(), ARCHITECTURES[config.model_type]), assign=True)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        model.save_pretrained(temporary)
        if tokenizer is not None and tokenizer.is_dir():
            copy_tokenizer(tokenizer, temporary)
        generation = read_json(temporary / GENERATION)
        eos = {"eos_token_id": generation.get("eos_token_id") if eos_token_id is None else eos_token_id}
        write_text(temporary / GENERATION, json.dumps(generation | eos, indent=2))
        values = read_json(temporary / "config.json") | eos
        rotation = values.get("rope_parameters", {"rope_type": "learned positions"})
        if "rope_theta" in rotation:  # other programs, and transformers before version 5, read these names
            values["rope_scaling"] = None if rotation["rope_type"] == "default" else rotation
            values |= {key: rotation[key] for key in ("rope_theta", "partial_rotary_factor") if key in rotation}
        write_text(temporary / "config.json", json.dumps(values, indent=2))
        temporary.chmod(0o755)  # mkdtemp's are private
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return f"{type(model).__name__}, {rotation['rope_type']}"


def _configuration(net: GPT) -> Any:
    """The configuration of the architecture that computes what `net` computes.

    Raises:
        ValueError: transformers has none; names the nearest, and what stands in the way.
    """
    cfg, pe = net.cfg, net.encodings[0]
    learned = isinstance(pe, Learned)
    position, *others = (
        {"n_positions": pe.max_len} if learned else rope.write(pe, net.train_len) | {"sliding_window": pe.window}
        for pe in net.distinct_encodings
    )
    if any(other != position for other in others):
        raise ValueError("a pattern of encodings over the layers cannot be exported: transformers has one for all")
    wrong = {kind: arch.refused(cfg) for kind, arch in ARCHITECTURES.items() if learned == (kind == "gpt2")}
    for kind, reasons in wrong.items():
        if pe.window is not None and not ARCHITECTURES[kind].window:
            reasons.append(f"pe.window={pe.window}")
        if isinstance(pe, Rotary) and pe.rotary_dim != pe.head_dim and not ARCHITECTURES[kind].partial:
            reasons.append(f"pe.partial_rotary_factor={pe.partial_rotary_factor}")
    kind = min(wrong, key=lambda kind: len(wrong[kind]))
    arch = ARCHITECTURES[kind]
    if wrong[kind]:
        raise ValueError(
            f"transformers has no architecture for this network: the nearest, {arch.name}, cannot have "
            f"{' and '.join(wrong[kind])}"
        )
    values = {ours: getattr(cfg, ours) for ours in arch.settings}
    values["mlp"] = next(theirs for theirs, ours in reversed(ACTIVATIONS.items()) if ours == cfg.mlp)
    if not learned:
        values |= {"n_kv_head": cfg.kv_heads, "head_dim": cfg.head_width, "hidden_dim": cfg.hidden}
    fields = {theirs: values[ours] for ours, theirs in arch.settings.items()} | position
    # Left out, special tokens would get the numbers that they have in some famous tokenizer.
    fields |= {"vocab_size": net.vocab_size} | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if learned:
        fields |= {"resid_pdrop": cfg.dropout, "embd_pdrop": cfg.dropout, "attn_pdrop": 0.0}
    if kind in ("llama", "qwen3"):
        fields |= {"attention_bias": bool(cfg.bias), "mlp_bias": cfg.bias is True}
    if kind in ("qwen2", "qwen3"):
        fields |= {"use_sliding_window": pe.window is not None, "max_window_layers": 0}
    try:
        config = library().AutoConfig.for_model(kind, **fields)
        if not learned:
            rope.check(pe, config, arch)
    except Exception as error:  # the library raises many kinds
        raise ValueError(f"{arch.name} of transformers cannot compute this network: {error}") from None
    return config


def _weights(net: GPT, expected: dict[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """The weights of `net` as the tensors `expected` of transformers; biases that it lacks are zero."""
    pe = net.encodings[0]
    theirs = {}
    for name, value in net.state_dict().items():
        value = value.detach()
        if isinstance(pe, Learned) and name.endswith(".table"):  # the vectors of the positions it reaches at its scale
            positions = torch.arange(pe.max_len, device=value.device)
            with torch.no_grad():
                value = pe.embed(torch.zeros(len(positions), net.cfg.dim, device=value.device), positions)
        elif isinstance(pe, Rotary) and pe.layout == "interleaved":
            value = _to_halves(name, value, net.cfg, pe.rotary_dim)
        if name in ("embedding.weight", "head.weight"):
            value = value[: net.vocab_size]
        if arch.transposes(name):
            value = value.T
        names = arch.tensors(name)
        rows = [expected[part].size(0) for part in names]
        for part, piece in zip(names, value.split(rows), strict=True):
            theirs[part] = piece.clone(memory_format=torch.contiguous_format).cpu()  # views share memory
    for name in expected.keys() - theirs.keys():
        assert "bias" not in arch.accepts, name
        theirs[name] = torch.zeros(expected[name].shape, dtype=net.embedding.weight.dtype)
    return theirs


def _to_halves(name: str, value: Tensor, cfg: GPTConfig, rotary_dim: int) -> Tensor:
    """A tensor, the rotated channels of its queries and keys moved: pair (2i, 2i + 1) to (i, i + rotary_dim / 2)."""
    channels = torch.arange(cfg.head_width)
    channels[:rotary_dim] = channels[:rotary_dim].unflatten(0, (-1, 2)).T.flatten()
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return value[channels]
    if ".attn.qkv." not in name:
        return value
    heads = value.unflatten(0, (-1, cfg.head_width))  # [H + 2 Hkv, D, ...]
    rotated = cfg.n_head + cfg.kv_heads
    return torch.cat((heads[:rotated, channels], heads[rotated:])).flatten(0, 1)
