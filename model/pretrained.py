"""Hugging Face weights in and out: folders with a config.json and safetensors, as transformers reads and writes them.

Nothing that a folder brings is executed: no pickle, no code of its own. Neither way needs transformers.
"""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model import position
from model.architectures import ARCHITECTURES, Architecture, read_config, write_config
from model.files import read_json
from model.gpt import GPT, GPTConfig
from model.position.absolute import Learned
from model.position.rotary import Rotary

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_INDEX = "model.safetensors.index.json"
_DESCRIPTION = ("config.json", "generation_config.json", _INDEX, *TOKENIZER_FILES)
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_OLD_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")  # in files of older versions


@dataclass(frozen=True)
class Pretrained:
    """A model of transformers. Its config.json was read; its weights are when `net` is asked for."""

    source: str
    folder: Path
    architecture: Architecture
    cfg: GPTConfig
    pe: dict[str, Any]
    vocab_size: int
    train_len: int  # max_position_embeddings
    tokenizer: dict[str, Any] | None  # the source, and the SHA-256 of each file
    eos: int | list[int] | None

    @property
    def original_len(self) -> int:
        """Tokens the model was trained at before any extension."""
        return self.pe.get("original_len", self.train_len)

    def describe(self) -> dict[str, Any]:
        """What `model.store.describe` says of a run's model."""
        sizes = {"vocab_size": self.vocab_size, "train_len": self.train_len}
        return {"model": self.cfg.model_dump(), "pe": self.pe, **sizes, "tokenizer": self.tokenizer}

    @cached_property
    def net(self) -> GPT:
        """The network, in evaluation mode and fp32.

        Raises:
            ValueError: weights are missing, damaged or pickled, or do not fit config.json; names them.
        """
        if not _local(self.source).is_dir():
            _fetch(self.source, ["model*.safetensors"])
        with torch.device("meta"):
            net = GPT(self.cfg, self.pe, vocab_size=self.vocab_size, train_len=self.train_len)
        weights = _read_weights(self.folder, net, self.architecture)
        if self.cfg.tie_embeddings:
            weights["head.weight"] = weights["embedding.weight"]
        net.load_state_dict(weights, assign=True)
        if self.cfg.tie_embeddings:
            net.head.weight = net.embedding.weight
        return net.eval()


def load_pretrained(source: str) -> Pretrained:
    """The model of transformers at `source`: "hf:" and a local folder, or else an id of the Hugging Face hub.

    Raises:
        ValueError: there is none, its config.json is damaged, or asks for what our network cannot do; names the
            setting.
    """
    folder = _local(source) if _local(source).is_dir() else _fetch(source, _DESCRIPTION)
    path = folder / "config.json"
    config = read_json(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        names = ", ".join(map(str, config.get("architectures") or [])) or "of an unknown architecture"
        raise ValueError(f"{source} is {names} (model_type={kind!r}); these can be read: {', '.join(ARCHITECTURES)}")
    try:
        cfg, pe, vocab_size, train_len = read_config(config)
        with torch.device("meta"):
            position.build(pe, cfg.shape(train_len))  # checks its options
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:  # numbers out of range, text for numbers
        raise ValueError(f"{path}: {error}") from None
    files = {name: _sha256(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    tokenizer = {"source": source, "files": files} if files else None
    eos = config.get("eos_token_id")
    return Pretrained(source, folder, ARCHITECTURES[kind], cfg, pe, vocab_size, train_len, tokenizer, eos)


def export(net: GPT, folder: Path, *, eos: int | list[int] | None = None, tokenizer: Path | None = None) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` opens, at once or not at all.

    The model reads there as `net` reads now: within `GPT.reading` that may be at another scale than the trained one.
    Its logits are ours, but for those of tokens that pad the vocabulary, which are left out. Interleaved rotations are
    written in the half layout, their channels permuted; where the architecture has biases and `net` has none, as zeros.

    Args:
        folder: must not exist, or be empty.
        eos: id, or ids, of the token that ends a text.
        tokenizer: a folder; its tokenizer files and generation_config.json are copied, those that there are.

    Raises:
        ValueError: the folder is not empty, or no architecture of transformers computes what `net` does.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: choose another, or remove it")
    config = write_config(net)
    weights = _written(net, ARCHITECTURES[config["model_type"]])
    dtype = _DTYPES.get(net.embedding.weight.dtype, "float32")
    # Left out, special tokens would get the numbers that they have in some famous tokenizer.
    config |= {"dtype": dtype, "bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        _write_json(temporary / "config.json", config)
        _write_json(temporary / "generation_config.json", {"eos_token_id": eos})
        for name in ("generation_config.json", *TOKENIZER_FILES):
            if tokenizer is not None and (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, temporary / name)
        temporary.chmod(0o755)  # mkdtemp's are private
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_tokenizer(pretrained: Pretrained, folder: Path) -> None:
    """Keep what `export` will need of an imported model: its tokenizer files and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("generation_config.json", *TOKENIZER_FILES):
        if (pretrained.folder / name).is_file():
            shutil.copyfile(pretrained.folder / name, folder / name)


def _written(net: GPT, arch: Architecture) -> dict[str, Tensor]:
    """The weights of `net` as the architecture has them."""
    pe = net.encodings[0]
    ours = {name: value.detach() for name, value in net.state_dict().items()}
    if isinstance(pe, Learned):  # the vectors of the positions that it reaches at its scale
        device = pe.table.device
        positions = torch.arange(pe.max_len, device=device)
        with torch.no_grad():
            ours["positions.0.table"] = pe.embed(torch.zeros(len(positions), net.cfg.dim, device=device), positions)
    elif isinstance(pe, Rotary) and pe.layout == "interleaved":
        ours = {name: _to_halves(name, value, net.cfg, pe.dim) for name, value in ours.items()}
    with torch.device("meta"):
        cfg = net.cfg.model_copy(update={"bias": True if arch.all_biased else net.cfg.bias, "vocab_multiple": 1})
        like = GPT(cfg, {"_target_": "model.position.base.PositionEncoding"}, vocab_size=net.vocab_size, train_len=2)
        like.positions = net.positions
    theirs = {}
    for name, pieces in arch.parts(like).items():
        value = ours.get(name)
        if value is None:
            value = torch.zeros(sum(shape[0] for _, shape in pieces), dtype=net.embedding.weight.dtype)
        value = value[: net.vocab_size] if name in ("embedding.weight", "head.weight") else value
        rows = [shape[-1] if arch.turns(name) else shape[0] for _, shape in pieces]
        for (full, _), part in zip(pieces, value.split(rows) if len(rows) > 1 else [value], strict=True):
            prefix = "" if full.startswith("lm_head.") else arch.prefix
            part = part.T if arch.turns(name) else part
            theirs[prefix + full] = part.clone(memory_format=torch.contiguous_format).cpu()  # views share memory
    return theirs


def _to_halves(name: str, value: Tensor, cfg: GPTConfig, dim: int) -> Tensor:
    """A tensor, the first `dim` channels of its queries and keys moved so that pair (2i, 2i + 1) comes to
    (i, i + dim/2)."""
    channels = torch.arange(cfg.head_width)
    channels[:dim] = channels[:dim].unflatten(0, (-1, 2)).T.flatten()
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return value[channels]
    if ".attn.qkv." not in name:
        return value
    heads = value.unflatten(0, (-1, cfg.head_width))  # [H + 2 Hkv, D, ...]
    turned = cfg.n_head + cfg.kv_heads
    return torch.cat((heads[:turned, channels], heads[turned:])).flatten(0, 1)


def _read_weights(folder: Path, net: GPT, arch: Architecture) -> dict[str, Tensor]:
    """The weights in `folder` under the names of `GPT.state_dict`, fp32. Raises ValueError if they do not fit `net`."""
    with ExitStack() as stack:
        files: dict[str, tuple[str, Any]] = {}  # name without prefix: (name, open file)
        for path in _weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read ({error}): is it complete?") from None
            files |= {name.removeprefix(arch.prefix): (name, file) for name in file.keys()}  # noqa: SIM118

        def tensor(name: str) -> Tensor:
            full, file = files[name]
            value = file.get_tensor(full)
            if value.dtype not in _DTYPES:
                raise ValueError(f"{full} in {folder} is {value.dtype}; read are {', '.join(_DTYPES.values())}")
            return value.float()

        shapes = {name: tuple(file.get_slice(full).get_shape()) for name, (full, file) in files.items()}
        found = {name: shape for name, shape in shapes.items() if not _OLD_BUFFERS.search(name)}
        parts = arch.parts(net)
        expected = dict(piece for pieces in parts.values() for piece in pieces)
        first = parts["embedding.weight"][0][0]
        if net.cfg.tie_embeddings and "lm_head.weight" in found and first in found:
            if not torch.equal(tensor("lm_head.weight"), tensor(first)):
                raise ValueError(f"{folder}: by its config.json lm_head.weight is {first}, but it differs")
            del found["lm_head.weight"]
        for trouble, names in (
            ("lacks", expected.keys() - found.keys()),
            ("has what its config.json does not describe:", found.keys() - expected.keys()),
            ("has in another shape than its config.json says:", {n for n in expected if expected[n] != found.get(n)}),
        ):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                raise ValueError(f"{folder} {trouble} {', '.join(sorted(names)[:5])}{more}")
        weights = {ours: torch.cat([tensor(name) for name, _ in pieces]) for ours, pieces in parts.items()}
    return {ours: value.T.contiguous() if arch.turns(ours) else value for ours, value in weights.items()}


def _weight_files(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if (folder / _INDEX).is_file():
        places = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(places, dict) or any(Path(str(place)).name != place for place in places.values()):
            raise ValueError(f"{folder / _INDEX} is not an index of files beside it")
        names = sorted(set(places.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing)}: is the download complete?")
        return [folder / name for name in names]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} has its weights as pickle ({pickled[0]}), which may run code when it is opened: if you trust "
            f"it, save_pretrained of transformers, after its from_pretrained, makes safetensors of it"
        )
    raise ValueError(f"{folder} has no model.safetensors, and no {_INDEX} of several")


def _local(source: str) -> Path:
    return Path(source.removeprefix("hf:"))


def _fetch(source: str, files: Sequence[str]) -> Path:
    """The folder with those files of a model on the hub; downloaded unless they are in its cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source.removeprefix("hf:"), allow_patterns=list(files)))
    except Exception as error:  # whatever the network brings
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{source} is no local folder, and the Hugging Face hub does not give it ({type(error).__name__}: "
            f"{reason}): check the name; a restricted model needs `hf auth login`; offline, give a folder"
        ) from None


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
