"""Models of transformers read into our network."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from common.files import hub_folder, own_file, read_json
from conf.schema import GPTConfig
from model import position
from model.gpt import GPT, parse_config
from model.hf import rope
from model.hf.architectures import ARCHITECTURES, MIXTURES_OF_EXPERTS, Architecture
from model.position import Shape
from model.position.absolute import Learned

_FILES = ("config.json", "model*.safetensors", "model.safetensors.index.json")
_SAFELY = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
_REPORT = {"ignore_mismatched_sizes": True, "output_loading_info": True}  # tensors that do not fit are named
_NEUTRAL = {  # settings that change what is computed, and the value that does not
    "quantization_config": None,
    "transformers_weights": None,
    "rope_interleaved": False,
    "rope_interleave": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "use_bias": True,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
_LEARNED = {"name": "learned", "_target_": f"{Learned.__module__}.{Learned.__name__}", "scale": 1.0}


@dataclass(frozen=True)
class Pretrained:
    """A model of transformers: its configuration was read, its weights are when they are asked for."""

    folder: Path
    config: Any  # of transformers
    cfg: GPTConfig
    pe: dict[str, Any]
    vocab_size: int
    train_len: int  # max_position_embeddings

    def describe(self) -> dict[str, Any]:
        """What model.json says of a run's model."""
        sizes = {"vocab_size": self.vocab_size, "train_len": self.train_len, "original_len": self.train_len}
        return {"model": self.cfg.model_dump(), "pe": self.pe} | sizes

    def state_dict(self) -> dict[str, Tensor]:
        """The weights under the names of our network, fp32.

        Raises ValueError: they are missing, damaged or pickled, or do not fit config.json; names the tensors.
        """
        if (self.folder / "adapter_config.json").exists():
            raise ValueError(f"{self.folder} has an adapter, which is not read: merge it into the weights")
        try:
            model, report = library().AutoModelForCausalLM.from_pretrained(
                self.folder, config=self.config, dtype=torch.float32, attn_implementation="eager", **_SAFELY, **_REPORT
            )
        except Exception as error:  # the library raises many kinds
            remedy = "they must be complete, and safetensors: other formats may run code"
            raise ValueError(f"the weights in {self.folder} cannot be read ({error}): {remedy}") from None
        wrong = {*report["missing_keys"], *report["unexpected_keys"], *(name for name, *_ in report["mismatched_keys"])}
        if wrong:
            some = ", ".join(sorted(wrong)[:5])
            raise ValueError(f"{self.folder}: config.json describes other weights; {len(wrong)} differ, such as {some}")
        arch, theirs = ARCHITECTURES[self.config.model_type], model.state_dict()
        with torch.device("meta"):
            ours = GPT(self.cfg, self.pe, vocab_size=self.vocab_size, train_len=self.train_len).state_dict()
        for name in ours:
            parts = [theirs[part] for part in arch.tensors(name)]
            value = torch.cat(parts) if len(parts) > 1 else parts[0]  # without a copy where none is needed
            value = value.T.contiguous() if arch.transposes(name) else value
            shift, factor = arch.folded(self.config, name)
            ours[name] = value if (shift, factor) == (0, 1) else (value + shift) * factor
        if self.cfg.tie_embeddings and not torch.equal(ours["head.weight"], ours["embedding.weight"]):
            raise ValueError(f"{self.folder}: tie_word_embeddings=true, but the head and the embedding differ")
        return ours


def library() -> ModuleType:
    """The module `transformers`. Raises ValueError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ValueError('this needs transformers: pip install -e ".[hf]"') from None
    return transformers


def read_model(source: str | Path) -> Pretrained:
    """The model of transformers at `source`: a folder, or else an id of the Hugging Face hub, with or without "hf:".

    Raises ValueError: there is none, transformers is not installed, or config.json is damaged or asks for what our
    network cannot do; names the setting.
    """
    transformers, folder = library(), hub_folder(str(source).removeprefix("hf:"), _FILES)
    path = folder / "config.json"
    values = read_json(own_file(path))
    kind = str(values.get("model_type"))
    if kind not in ARCHITECTURES:
        why = ", which has a mixture of experts" if kind in MIXTURES_OF_EXPERTS else ""
        raise ValueError(f"{source} has model_type={kind!r}{why}; these can be read: {', '.join(ARCHITECTURES)}")
    arch = ARCHITECTURES[kind]
    try:
        if (layers := values.get("num_hidden_layers", 0)) > 10_000:  # before the library makes a list of them
            raise ValueError(f"num_hidden_layers={layers} is more than 10,000")
        config = transformers.CONFIG_MAPPING[kind].from_dict(values)
        for key, neutral in _NEUTRAL.items():
            if getattr(config, key, neutral) != neutral:
                raise ValueError(f"{key}={getattr(config, key)!r} cannot be honoured, only {neutral!r} can")
        cfg = _architecture(config, arch)
        shape = position.Shape.of(cfg, config.max_position_embeddings)
        pe = _LEARNED | {"original_len": shape.train_len} if kind == "gpt2" else _encodings(config, arch, shape)
        with torch.device("meta"):
            refused = arch.refused(cfg, position.build_encodings(pe, shape))
        if refused:
            raise ValueError(f"{' and '.join(refused)} cannot be honoured")
    except Exception as error:  # text where numbers belong, numbers out of range: the library raises many kinds
        raise ValueError(f"{path}: {error}") from None
    return Pretrained(folder, config, cfg, pe, config.vocab_size, shape.train_len)


def _architecture(config: Any, arch: Architecture) -> GPTConfig:
    """The architecture of a configuration. Dropout is not taken over: it is a choice of the training."""
    settings: dict[str, Any] = {ours: getattr(config, theirs, None) for ours, theirs in arch.settings.items()}
    settings |= {key: arch.accepts[f"model.{key}"][0] for key in ("norm", "norm_at", "parallel", "qk_norm")}
    settings["mlp"] = arch.activations.get(settings["mlp"], settings["mlp"])
    if settings.get("head_dim") and settings["head_dim"] * settings["n_head"] == settings["dim"]:
        settings["head_dim"] = None
    biases = getattr(config, "attention_bias", False), getattr(config, "mlp_bias", False)
    said = {(False, False): False, (True, False): "attention", (True, True): True}.get(biases)
    accepted = arch.accepts.get("model.bias", (True,))
    settings["bias"] = accepted[0] if len(accepted) == 1 else said
    return parse_config(settings)


def _encodings(config: Any, arch: Architecture, shape: Shape) -> dict[str, Any]:
    """The `pe` options for a configuration: of all layers, or of each part of a pattern over them."""
    layers = rope.layers(config)
    by_window = len({layer.window for layer in layers}) > 1
    names = {rope.SLIDING: "local", rope.FULL: "global", True: "rope", False: "nope"}
    pattern = [names[layer.kind if by_window else layer.rotates] for layer in layers]
    parts: dict[str, Any] = {}
    for name, layer in dict.fromkeys(zip(pattern, layers, strict=True)):
        part = rope.read(config, arch, shape, layer)
        if parts.setdefault(name, part) != part:
            raise ValueError(f"no_rope_layers={config.no_rope_layers} with these layer_types cannot be honoured")
    return {"name": config.model_type, "pattern": pattern} | parts if len(parts) > 1 else parts[pattern[0]]
