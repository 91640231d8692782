"""Reading models of transformers into our network."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from conf.schema import GPTConfig
from model import position
from model.gpt import GPT, parse_config
from model.position import Shape
from model.position.absolute import Learned
from ropewalk.files import hub_folder, own_file, read_json
from ropewalk.hf import rope
from ropewalk.hf.architectures import ARCHITECTURES, MIXTURES_OF_EXPERTS, Architecture

_FILES = ("config.json", "model*.safetensors", "model.safetensors.index.json")
_SAFELY = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
# Not an error, but a report of all tensors that do not fit, so that ours can name them.
_REPORT = {"ignore_mismatched_sizes": True, "output_loading_info": True}

# Settings that change the computation in a way that our network lacks, each with the one value that is supported.
_NEUTRAL = {
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
_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class Pretrained:
    """A model of transformers whose configuration has been read; its weights are read on demand."""

    folder: Path
    config: Any  # of transformers
    cfg: GPTConfig
    pe: dict[str, Any]
    vocab_size: int
    train_len: int  # max_position_embeddings

    def describe(self) -> dict[str, Any]:
        """Return the entries that model.json has for the model of a run."""
        return {
            "model": self.cfg.model_dump(),
            "pe": self.pe,
            "vocab_size": self.vocab_size,
            "train_len": self.train_len,
            "original_len": self.train_len,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights under the names of our network, fp32.

        Raises:
            ValueError: they are missing, damaged or pickled, or do not fit config.json; names the tensors.
        """
        arch = ARCHITECTURES[self.config.model_type]
        theirs = self._weights_of_transformers()
        with torch.device("meta"):
            net = GPT(self.cfg, self.pe, vocab_size=self.vocab_size, train_len=self.train_len)
        ours = {}
        for name in net.state_dict():
            parts = [theirs[part] for part in arch.tensors(name)]
            # A single part is not copied: of a large model that would take as much memory again.
            value = torch.cat(parts) if len(parts) > 1 else parts[0]
            if arch.transposes(name):
                value = value.T.contiguous()
            shift, factor = arch.folding(self.config, name)
            if (shift, factor) != (0, 1):
                value = (value + shift) * factor
            ours[name] = value
        # Files of tied models may hold the head as well, as a copy of the embedding.
        if self.cfg.tie_embeddings and not torch.equal(ours["head.weight"], ours["embedding.weight"]):
            raise ValueError(f"{self.folder}: tie_word_embeddings=true, but the head and the embedding differ")
        return ours

    def _weights_of_transformers(self) -> dict[str, Tensor]:
        """Return the weights under the names of transformers, fp32. Raises ValueError as `state_dict` does."""
        if (self.folder / "adapter_config.json").exists():
            raise ValueError(f"{self.folder} has an adapter, which is not read: merge it into the weights")
        try:
            model, report = library().AutoModelForCausalLM.from_pretrained(
                self.folder, config=self.config, dtype=torch.float32, attn_implementation="eager", **_SAFELY, **_REPORT
            )
        except Exception as error:  # the library raises many kinds
            remedy = "they must be complete, and safetensors: other formats may run code"
            raise ValueError(f"the weights in {self.folder} cannot be read ({error}): {remedy}") from None
        # The library only reports tensors that do not fit, and leaves random values in their place.
        mismatched = {name for name, *_ in report["mismatched_keys"]}
        wrong = sorted(mismatched.union(report["missing_keys"], report["unexpected_keys"]))
        if wrong:
            examples = ", ".join(wrong[:5])
            raise ValueError(
                f"{self.folder}: config.json describes other weights; {len(wrong)} differ, such as {examples}"
            )
        return model.state_dict()


def library() -> ModuleType:
    """Return the module `transformers`. Raises ValueError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ValueError('this needs transformers: pip install -e ".[hf]"') from None
    return transformers


def read_model(source: str | Path) -> Pretrained:
    """Read the configuration of a model of transformers.

    Args:
        source: a folder, or else an id of the Hugging Face hub, with or without "hf:".

    Raises:
        ValueError: there is no such model, transformers is not installed, or config.json is damaged or asks for
            something that our network cannot compute; names the setting.
    """
    library()  # before anything is downloaded
    folder = hub_folder(str(source).removeprefix("hf:"), _FILES)
    path = folder / "config.json"
    values = read_json(own_file(path))
    kind = str(values.get("model_type"))
    if kind not in ARCHITECTURES:
        why = ", which has a mixture of experts" if kind in MIXTURES_OF_EXPERTS else ""
        raise ValueError(f"{source} has model_type={kind!r}{why}; these can be read: {', '.join(ARCHITECTURES)}")
    try:
        return _interpret(folder, values, kind)
    except Exception as error:  # text where numbers belong, numbers out of range: the library raises many kinds
        raise ValueError(f"{path}: {error}") from None


def _interpret(folder: Path, values: dict[str, Any], kind: str) -> Pretrained:
    """Return the model that the values in config.json describe.

    Raises:
        ValueError: names a setting that our network lacks.
    """
    arch = ARCHITECTURES[kind]
    # Checked first, since the library would make a list of all layers.
    n_layer = values.get("num_hidden_layers", 0)
    if n_layer > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers={n_layer} is more than {_MOST_LAYERS:,}")
    config = library().CONFIG_MAPPING[kind].from_dict(values)
    for key, neutral in _NEUTRAL.items():
        value = getattr(config, key, neutral)
        if value != neutral:
            raise ValueError(f"{key}={value!r} is not supported (only {neutral!r} is)")

    cfg = _architecture(config, arch)
    shape = Shape.of(cfg, config.max_position_embeddings)
    pe = _encodings(config, arch, shape)
    with torch.device("meta"):
        refused = arch.refused(cfg, position.build_encodings(pe, shape))
    if refused:
        raise ValueError(f"{' and '.join(refused)} is not supported")
    return Pretrained(folder, config, cfg, pe, config.vocab_size, shape.train_len)


def _architecture(config: Any, arch: Architecture) -> GPTConfig:
    """Return our settings for a configuration. Dropout is left out: it belongs to a training, not to a model."""
    settings: dict[str, Any] = {ours: getattr(config, theirs, None) for ours, theirs in arch.settings.items()}
    # transformers has no settings for these: an architecture has one value of each.
    for key in ("norm", "norm_at", "qk_norm"):
        settings[key] = arch.accepts[f"model.{key}"][0]
    settings["bias"] = _bias(config, arch)
    settings["mlp"] = arch.activations.get(settings["mlp"], settings["mlp"])
    # A width of heads that is the default is left open, as in a configuration of our own.
    head_dim = settings.get("head_dim")
    if head_dim and head_dim * settings["n_head"] == settings["dim"]:
        settings["head_dim"] = None
    return parse_config(settings)


def _bias(config: Any, arch: Architecture) -> Any:
    """Return `model.bias` for a configuration; None, which is refused, if no value of it fits."""
    accepted = arch.accepts.get("model.bias", (True,))
    if len(accepted) == 1:
        return accepted[0]
    in_attention = getattr(config, "attention_bias", False)
    in_mlp = getattr(config, "mlp_bias", False)
    return {(False, False): False, (True, False): "attention", (True, True): True}.get((in_attention, in_mlp))


def _encodings(config: Any, arch: Architecture, shape: Shape) -> dict[str, Any]:
    """Return the `pe` options for a configuration: of all layers, or of each part of a pattern over them."""
    if config.model_type == "gpt2":
        return _LEARNED | {"original_len": shape.train_len}
    layers = rope.layers(config)
    has_two_windows = len({layer.window for layer in layers}) > 1

    def name(layer: rope.Layer) -> str:
        if has_two_windows:
            return "global" if layer.window is None else "local"
        return "rope" if layer.rotates else "nope"

    # A pattern tells its parts apart by their windows or, if all layers have the same, by whether they rotate. Layers
    # that differ in both would need a third part.
    parts: dict[str, Any] = {}
    for layer in dict.fromkeys(layers):  # each kind is read once, however many layers there are
        part = rope.read(config, arch, shape, layer)
        if parts.setdefault(name(layer), part) != part:
            raise ValueError(f"no_rope_layers={config.no_rope_layers} with these layer_types is not supported")
    pattern = [name(layer) for layer in layers]
    if len(parts) == 1:
        return parts[pattern[0]]
    return {"name": config.model_type, "pattern": pattern} | parts
