"""Reading models of transformers into our network."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from conf.files import hub_folder, own_file, read_json
from conf.schema import GPTConfig, parse
from model.gpt import GPT
from model.position import Shape, build_encodings
from model.position.absolute import Learned
from ropewalk.hf import rope
from ropewalk.hf.architectures import ARCHITECTURES, Architecture

INDEX = "model.safetensors.index.json"
FILES = ("config.json", "model*.safetensors", INDEX)
# Tensors of old files that hold no weights: masks, and what angles are computed from.
BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")

# Settings that change the computation in a way that our network lacks, each with the one value that is supported.
NEUTRAL = {
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
    "is_causal": True,
}


@dataclass(frozen=True)
class Pretrained:
    """A model of transformers whose configuration has been read; its weights are read on demand."""

    folder: Path
    config: Any  # of transformers
    cfg: GPTConfig
    pe: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """Return the entries that model.json has for the model of a run."""
        return {
            "model": self.cfg.model_dump(),
            "pe": self.pe,
            "vocab_size": self.config.vocab_size,
            "train_len": self.config.max_position_embeddings,
            "original_len": self.config.max_position_embeddings,
        }

    def identity(self) -> str:
        """Return a hash that changes with the files of the weights, by their sizes and times."""
        paths = self.folder.glob("*.safetensors")
        values = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
        return hashlib.sha256(str(values).encode()).hexdigest()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights under the names of our network, fp32.

        Raises:
            ValueError: they are missing, damaged or pickled, or do not fit config.json; names the tensors.
        """
        config = self.config
        arch = ARCHITECTURES[config.model_type]
        theirs = self._weights_of_transformers()
        with torch.device("meta"):
            net = GPT(self.cfg, self.pe, vocab_size=config.vocab_size, train_len=config.max_position_embeddings)
        ours = {}
        for name in net.state_dict():
            ours[name] = arch.read(name, arch.parts(name, theirs), config)
        # Files of tied models may hold the head as well, as a copy of the embedding.
        if self.cfg.tie_embeddings and not torch.equal(ours["head.weight"], ours["embedding.weight"]):
            raise ValueError(f"{self.folder}: tie_word_embeddings=true, but the head and the embedding differ")
        return ours

    def _weights_of_transformers(self) -> dict[str, Tensor]:
        """Return the weights under the names of transformers, fp32. Raises ValueError as `state_dict` does."""
        if (self.folder / "adapter_config.json").exists():
            raise ValueError(f"{self.folder} has an adapter, which is not read: merge it into the weights")
        try:
            _refuse_files_elsewhere(self.folder)
            model, report = library().AutoModelForCausalLM.from_pretrained(
                self.folder,
                config=self.config,
                dtype=torch.float32,
                attn_implementation="eager",
                # No pickle is opened, no code of the folder runs, and nothing is downloaded.
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                # Not an error, but a report of all tensors that do not fit, so that ours can name them.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:  # the library raises many kinds
            raise ValueError(
                f"the weights in {self.folder} cannot be read ({error}): "
                "they must be complete, and safetensors: other formats may run code"
            ) from None
        # The library only reports tensors that do not fit, and leaves random values in their place.
        wrong = {name for name, *_ in report["mismatched_keys"]}.union(report["missing_keys"])
        wrong |= {name for name in report["unexpected_keys"] if not BUFFERS.fullmatch(name)}
        if wrong:
            examples = ", ".join(sorted(wrong)[:5])
            raise ValueError(
                f"{self.folder}: config.json describes other weights; {len(wrong)} differ, such as {examples}"
            )
        return model.state_dict()


def _refuse_files_elsewhere(folder: Path) -> None:
    """Raise ValueError if the weights of a model lie outside of its folder, by a link or by the index of its parts."""
    index = folder / INDEX
    if index.exists():
        parts = dict(read_json(own_file(index)).get("weight_map", {})).values()
        elsewhere = [part for part in parts if Path(str(part)).name != part]
        if elsewhere:
            raise ValueError(f"{index} names {elsewhere[0]}, which is not in its folder: put it there")
    for path in folder.glob("*.safetensors"):
        own_file(path)


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
    folder = hub_folder(str(source).removeprefix("hf:"), FILES)
    path = folder / "config.json"
    values = read_json(own_file(path))
    model_type = str(values.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise ValueError(f"{source} has model_type={model_type!r}; these can be read: {', '.join(ARCHITECTURES)}")
    try:
        return _interpret(folder, values, model_type)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except Exception as error:  # text where numbers belong, a list too short: the library raises many kinds
        settings = {key: value for key, value in values.items() if key.startswith("rope_")}
        raise ValueError(
            f"{path}: transformers cannot use a setting, perhaps one of {settings} ({type(error).__name__}: {error})"
        ) from None


def _interpret(folder: Path, values: dict[str, Any], model_type: str) -> Pretrained:
    """Return the model that the values in config.json describe.

    Raises:
        ValueError: names a setting that our network lacks.
    """
    arch = ARCHITECTURES[model_type]
    if model_type == "olmo3" and not values.get("rope_parameters"):
        # The keys from before version 5, whose own reader forgets this base for layers with a window.
        plain = {"rope_type": "default", "rope_theta": values.get("rope_theta", 500_000.0)}
        by_layer_type = {rope.FULL: plain | (values.get("rope_scaling") or {}), rope.SLIDING: plain}
        values = values | {"rope_parameters": by_layer_type, "rope_scaling": None}
    config = library().CONFIG_MAPPING[model_type].from_dict(values)
    for key, neutral in NEUTRAL.items():
        value = getattr(config, key, neutral)
        if value != neutral:
            raise ValueError(f"{key}={value!r} is not supported (only {neutral!r} is)")

    cfg = _architecture(config, arch)
    shape = Shape.of(cfg, config.max_position_embeddings)
    pe = _encodings(config, arch, shape)
    with torch.device("meta"):
        refused = arch.refused(cfg, build_encodings(pe, shape))
    if refused:
        raise ValueError(f"{' and '.join(refused)} is not supported")
    return Pretrained(folder, config, cfg, pe)


def _architecture(config: Any, arch: Architecture) -> GPTConfig:
    """Return our settings for a configuration. Dropout is left out: it belongs to a training, not to a model."""
    settings: dict[str, Any] = {ours: getattr(config, theirs, None) for ours, theirs in arch.settings.items()}
    settings["mlp"] = arch.activations.get(settings["mlp"], settings["mlp"])
    # transformers has no settings for these: an architecture has one value of each.
    settings |= {key: arch.limits[f"model.{key}"][0] for key in ("norm", "norm_at", "qk_norm")}
    settings["bias"] = _bias(config, arch)
    # A width of heads that is the default is left open, as in a configuration of our own.
    head_dim = settings.get("head_dim")
    if head_dim and head_dim * settings["n_head"] == settings["dim"]:
        settings["head_dim"] = None
    return parse(GPTConfig, settings)


def _bias(config: Any, arch: Architecture) -> Any:
    """Return `model.bias` for a configuration. Raises ValueError: no value of it fits."""
    accepted = arch.limits.get("model.bias", (True,))
    if len(accepted) == 1:
        return accepted[0]
    # Architectures that accept several values have two settings: whether attention has biases, and whether the MLP has.
    pairs = {(False, False): False, (True, False): "attention", (True, True): True}
    asked = getattr(config, "attention_bias", False), getattr(config, "mlp_bias", False)
    if asked not in pairs:
        raise ValueError("attention_bias={} with mlp_bias={} is not supported".format(*asked))
    return pairs[asked]


def _encodings(config: Any, arch: Architecture, shape: Shape) -> dict[str, Any]:
    """Return the `pe` options for a configuration: of all layers, or of each part of a pattern over them."""
    if config.model_type == "gpt2":
        return rope.name_and_target("learned", Learned) | {"scale": 1.0, "original_len": shape.train_len}
    layers = rope.layers(config)
    # Parts are named as in the presets of conf/pe for these models: by their windows if these differ, else by whether
    # they rotate. "_nope" marks those that do not rotate among layers that differ in their windows.
    differ_in_window = len({layer.window for layer in layers}) > 1
    names = {}
    parts = {}
    for layer in dict.fromkeys(layers):  # each kind is read once, however many layers there are
        reach = "global" if layer.window is None else "local"
        if differ_in_window:
            names[layer] = reach if layer.rotates else f"{reach}_nope"
        else:
            names[layer] = "rope" if layer.rotates else "nope"
        parts[names[layer]] = rope.read(config, arch, shape, layer)
    if len(parts) == 1:
        return parts[names[layers[0]]]
    return {"name": config.model_type, "pattern": [names[layer] for layer in layers]} | parts
