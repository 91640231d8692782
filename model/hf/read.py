"""Models of transformers read into our network."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from model.files import read_json
from model.gpt import GPT, GPTConfig, parse_config
from model.hf import rope
from model.hf.architectures import ACTIVATIONS, ARCHITECTURES, Architecture
from model.position.absolute import Learned

GENERATION = "generation_config.json"
_TOKENIZER = ("tokenizer*.json", "tokenizer.model", "*_tokens*.json", "chat_template.jinja", "vocab.json", "merges.txt")
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_NEUTRAL = {  # settings that change what is computed, and the value that does not
    "quantization_config": None,
    "transformers_weights": None,
    "rope_interleaved": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "use_bias": True,
}
_OLD_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")  # in files of older versions


@dataclass(frozen=True)
class Pretrained:
    """A model of transformers: its configuration was read, its weights are when they are asked for."""

    folder: Path
    config: Any  # of transformers
    cfg: GPTConfig
    pe: dict[str, Any]
    vocab_size: int
    train_len: int  # max_position_embeddings
    eos_token_id: int | list[int] | None
    in_weights: float  # factor of the rotated channels of queries and keys, see rope.read

    def describe(self) -> dict[str, Any]:
        """What model.json says of a run's model."""
        sizes = {"vocab_size": self.vocab_size, "train_len": self.train_len}
        return {"model": self.cfg.model_dump(), "pe": self.pe} | sizes

    def state_dict(self) -> dict[str, Tensor]:
        """The weights under the names of our network, fp32.

        Raises:
            ValueError: they are missing, damaged or pickled, or do not fit config.json; names the tensors.
        """
        arch, cfg, theirs = ARCHITECTURES[self.config.model_type], self.cfg, _weights(self)
        head, embedding = (theirs[arch.tensors(f"{name}.weight")[0]] for name in ("head", "embedding"))
        if cfg.tie_embeddings and not torch.equal(head, embedding):
            raise ValueError(
                f"{self.folder}: by its config.json the head's weights are the embedding's, but they differ"
            )
        with torch.device("meta"):
            names = GPT(cfg, self.pe, vocab_size=self.vocab_size, train_len=self.train_len).state_dict()
        ours = {}
        for name in names:
            parts = [theirs[part] for part in arch.tensors(name)]
            value = torch.cat(parts) if len(parts) > 1 else parts[0]  # without a copy where none is needed
            ours[name] = value.T.contiguous() if arch.transposes(name) else value
            if self.in_weights != 1 and ".attn.qkv." in name:
                heads = value.unflatten(0, (-1, cfg.head_width))  # [H + 2 Hkv, D, dim]
                rotated = int(cfg.head_width * self.pe["partial_rotary_factor"])
                heads[: cfg.n_head + cfg.kv_heads, :rotated] *= self.in_weights
        return ours


def library() -> ModuleType:
    """The module `transformers`. Raises ValueError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ValueError('this needs transformers: pip install "ropewalk[hf]"') from None
    return transformers


def load(source: str | Path) -> Pretrained:
    """The model of transformers at `source`: a folder, or else an id of the Hugging Face hub, with or without "hf:".

    Raises:
        ValueError: there is none, transformers is not installed, or config.json is damaged or asks for what our
            network cannot do; names the setting.
    """
    transformers, folder = library(), _fetch(str(source).removeprefix("hf:"))
    values = read_json(_own_file(folder / "config.json"))
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        names = ", ".join(map(str, values.get("architectures") or [])) or "of an unknown architecture"
        raise ValueError(f"{source} is {names} (model_type={kind!r}); these can be read: {', '.join(ARCHITECTURES)}")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(values)
        cfg, train_len = _architecture(config, ARCHITECTURES[kind]), config.max_position_embeddings
        if min(config.vocab_size, train_len) < 1:
            raise ValueError("vocab_size and max_position_embeddings must be at least 1")
        pe: dict[str, Any]
        if kind == "gpt2":
            pe = {"name": "learned", "_target_": f"{Learned.__module__}.{Learned.__name__}"}
            pe, in_weights = pe | {"scale": 1.0, "train_scale": 1.0, "original_len": train_len}, 1.0
        else:
            pe, in_weights = rope.read(config, ARCHITECTURES[kind], cfg.shape(train_len))
        pe |= _window(config, ARCHITECTURES[kind])
    except Exception as error:  # text where numbers belong, numbers out of range: the library raises many kinds
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    return Pretrained(folder, config, cfg, pe, config.vocab_size, train_len, config.eos_token_id, in_weights)


def copy_tokenizer(folder: str | Path, out: str | Path) -> None:
    """Copy the tokenizer files and generation_config.json of a folder, those that there are, into the folder `out`.

    Raises:
        ValueError: one of them is a link out of its folder.
    """
    Path(out).mkdir(parents=True, exist_ok=True)
    for path in (path for pattern in (GENERATION, *_TOKENIZER) for path in Path(folder).glob(pattern)):
        if _own_file(path).is_file():
            target = Path(out) / path.name
            target.unlink(missing_ok=True)  # rather than to write through a link
            shutil.copyfile(path, target)


def _own_file(path: Path) -> Path:
    """The file that `path` is, unless it is a link out of its folder and not into the store of the hub's cache."""
    found, home = path.resolve(), path.parent.resolve()
    if path.is_symlink() and found.parent not in (home, home.parent.parent / "blobs"):
        raise ValueError(f"{path} is a link out of its folder, which is not followed: replace it by a copy of the file")
    return found


def _fetch(name: str) -> Path:
    """The folder of that name, or one with the files of a model on the hub: downloaded unless its cache has them."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", GENERATION, *_TOKENIZER, *_WEIGHTS]))
    except Exception as error:  # whatever the network brings
        raise ValueError(
            f"{name} is no local folder, and the Hugging Face hub does not give it ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}): check the name; a restricted model needs `hf auth login`; "
            f"offline, give a folder"
        ) from None


def _architecture(config: Any, arch: Architecture) -> GPTConfig:
    """The architecture of a configuration. Dropout is not taken over: it is a choice of the training."""
    for key, neutral in _NEUTRAL.items():
        if getattr(config, key, neutral) != neutral:
            raise ValueError(f"{key}={getattr(config, key)!r} cannot be honoured, only {neutral!r} can")
    settings: dict[str, Any] = {ours: getattr(config, theirs, None) for ours, theirs in arch.settings.items()}
    settings |= {key: arch.accepts[key][0] for key in ("norm", "qk_norm")}
    settings["mlp"] = ACTIVATIONS.get(settings["mlp"], settings["mlp"])
    if settings.get("head_dim") and settings["head_dim"] * settings["n_head"] == settings["dim"]:
        settings["head_dim"] = None
    biases = getattr(config, "attention_bias", False), getattr(config, "mlp_bias", False)
    settings["bias"] = {(False, False): False, (True, False): "attention", (True, True): True}.get(biases)
    if len(fixed := arch.accepts.get("bias", (True,))) == 1:
        settings["bias"] = fixed[0]
    cfg = parse_config(settings)
    if refused := arch.refused(cfg):
        raise ValueError(f"{', '.join(refused)} cannot be honoured")
    return cfg


def _window(config: Any, arch: Architecture) -> dict[str, int]:
    """The option of the encoding for a sliding window in all layers."""
    window, types = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
    by_layer = config.model_type.startswith("qwen")
    if (by_layer and types == {"full_attention"}) or (window is None and not types):
        return {}
    if window and arch.window and (not types or (by_layer and types == {"sliding_attention"})):
        return {"window": window}
    raise ValueError(
        f"sliding_window={window} with layer_types={sorted(types)} cannot be honoured; sliding_window=null, without "
        f"layer_types, reads the weights with full attention"
    )


def _weights(pretrained: Pretrained) -> dict[str, Tensor]:
    """The weights under the names of transformers, fp32."""
    folder = pretrained.folder
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} has an adapter, which is not read: merge it into the weights, or remove it")
    try:
        model, report = library().AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=pretrained.config,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # to name them
            output_loading_info=True,
        )
    except Exception as error:  # the library raises many kinds
        raise ValueError(
            f"the weights in {folder} cannot be read ({error}): they must be complete, and safetensors, because other "
            f"formats may run code when they are opened; save_pretrained of transformers makes safetensors of them"
        ) from None
    wrong = {*report["missing_keys"], *report["unexpected_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if names := sorted(name for name in wrong if not _OLD_BUFFERS.search(name)):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(
            f"the weights in {folder} are not those that its config.json describes: {', '.join(names[:5])}{more} are "
            f"missing, unknown or of another shape"
        )
    return model.state_dict()
