"""A trained model to start from or to read: a run, one of its checkpoints, or a model of transformers."""

from pathlib import Path
from typing import Any, NamedTuple

from conf.errors import ConfigError
from conf.files import read_json
from data.base import Data, build_data
from data.text import TextData
from model import serialization
from model.gpt import GPT
from ropewalk import hf
from ropewalk.app.compose import quoted
from ropewalk.app.configure import train_values
from ropewalk.app.resolve import Options, base_model, load_config, original_len, resolve
from ropewalk.run.directory import MADE_OF, RunDir, check_identity, data_options, find, steps_in
from ropewalk.run.processes import rank_zero_only
from ropewalk.training import checkpoints
from ropewalk.training.ranks import assign


class Trained(NamedTuple):
    """A trained network on the disk: the final weights of a run, or those of a checkpoint."""

    run: Path  # its directory
    step: int | None  # of the checkpoint; None: the final weights
    description: dict[str, Any]  # what model.json says, or would say
    data: Data  # not prepared

    def network(self, pe: dict[str, Any] | None = None) -> GPT:
        """Return the network in evaluation mode, read with the encoding `pe` instead of its own, if there is one.

        Raises ValueError: a file is missing or damaged, or the weights do not fit.
        """
        if self.step is None:
            return serialization.load(self.run, pe=pe)
        net = serialization.network(self.description, pe)
        checkpoints.resume(self.run / "checkpoints", net, None, only=self.step)
        return net.eval()


def opened(run: str | Path, cache_dir: str = "prepared", step: int | None = None) -> Trained:
    """Return a trained network. A model of transformers becomes a run of 0 steps first, whose path is printed.

    Args:
        run: a run directory, or hf:FOLDER_OR_HUB_ID for a model of transformers.
        cache_dir: folder of tokenised data.
        step: of the checkpoint to take; None: the final weights, or the newest checkpoint of a run that was stopped.

    Raises ValueError: there is no such model or checkpoint, or it cannot be read.
    """
    path = directory(run, cache_dir)
    steps = steps_in(path / "checkpoints")
    if step is None and steps and not (path / "training.json").is_file():
        step = steps[-1]
    if step is not None and step not in steps:
        raise ConfigError(f"{path} has no checkpoint of step {step}: its steps are {steps}")
    data = build_data(data_options(path, cache_dir))
    check_identity(path, data.tokenizer_identity())
    if step is None or (path / serialization.DESCRIPTION).is_file():
        description = serialization.describe(path)
    else:
        cfg = load_config(path)
        base = base_model(cfg.init_from)
        description = {
            "model": cfg.model.model_dump(),
            "pe": cfg.pe,
            "vocab_size": vocab_size(data, base),
            "train_len": cfg.train_len,
            "original_len": original_len(cfg, base),
        }
    return Trained(path, step, description, data)


def directory(run: str | Path, cache_dir: str) -> Path:
    """Return the directory of a run; of a model of transformers that of a run of 0 steps, made if there is none yet."""
    source = str(run)
    if not source.startswith("hf:"):
        return find(source)
    base = base_model(source)
    places = f"init_from={quoted(source)}", f"data.cache_dir={quoted(cache_dir)}"
    cfg = resolve(train_values(*places, "trainer.max_steps=0"))
    place = RunDir(cfg)
    place.check()
    check_start(place)
    if not (place.path / serialization.DESCRIPTION).is_file():
        data = build_data(cfg.data)
        net = GPT(cfg.model, cfg.pe, vocab_size=vocab_size(data, base), train_len=cfg.train_len)
        load_weights(net, base, partial=False)
        data.prepare()
        identity = data.identity()
        with place.lock():
            place.create(identity | made_of(base), data.tokenizer_files())
            serialization.save(net, place.path, pe=cfg.pe, tokenizer=identity, original_len=base["original_len"])
    print(f"{source} is the run {place.path}")
    return place.path


def made_of(base: Options) -> dict[str, Any]:
    """What tells the weights of the model `base`, if any, from later ones under the same name, for data.json."""
    if not base:
        return {}
    source = str(base["source"])
    return {MADE_OF: hf.read_model(source).identity() if source.startswith("hf:") else base.get("sha256")}


@rank_zero_only
def check_start(run: RunDir) -> None:
    """Raise ConfigError if a run without a step so far has begun with earlier weights of the model it starts from."""
    source = run.cfg.init_from
    has_steps = steps_in(run.checkpoints) or (run.cfg.trainer.max_steps and run.complete)
    if source is None or not run.begun or has_steps:
        return
    recorded = read_json(run.path / "data.json").get(MADE_OF)
    # None: an older version has made the run, and nothing tells its weights from others.
    if recorded not in (None, made_of(base_model(source))[MADE_OF]):
        raise ConfigError(f"{run.path} holds earlier weights of {source}: rename or delete it, and try again")


def vocab_size(data: Data, base: Options) -> int:
    """Return the vocabulary size of a network that starts from the model `base`, if any.

    The data may use fewer tokens than the model has, and their tokenizer may have more special ones, which no text has.
    Raises ConfigError: the data have other tokens.
    """
    if not base:
        return data.vocab_size
    tokenizer, size = base.get("tokenizer"), int(base["vocab_size"])
    differs = tokenizer and not data.tokenizer_identity().items() <= tokenizer.items()
    if differs or _largest_id(data) >= size:
        raise ConfigError(
            f"{base['source']} has a vocabulary of {size} tokens, the data one of {data.vocab_size}: "
            "leave out data.tokenizer to use the model's own, or choose its data; "
            "if its tokenizer has tokens that the model lacks, remove them"
        )
    return size


def _largest_id(data: Data) -> int:
    """The largest token id in any text of `data`: special tokens are in none, but for those at its start and end."""
    if not isinstance(data, TextData):
        return data.vocab_size - 1
    of_text = int(data.encoder.token_bytes.nonzero().max())
    return max(of_text, data.encoder.eot, data.text_start or 0)


def load_weights(net: GPT, base: Options, *, partial: bool) -> list[str]:
    """Give `net` the weights of the model `base`; returns the tensors that keep their initial values.

    With `partial` the tensors that fit no other are left out. Raises ConfigError: the weights cannot be read, one does
    not fit, or with `partial` none does; names them.
    """
    source = base["source"]
    if source.startswith("hf:"):
        weights = hf.read_model(source).state_dict()
    else:
        weights = serialization.read_weights(source, base)
    wrong = serialization.mismatched_tensors(net, weights)
    if wrong and not partial:
        raise ConfigError(
            f"the weights of {source} do not fit: "
            f"{', '.join(wrong[:5])} differ in name or shape; init_partial=true takes those that fit"
        )
    if not weights.keys() - wrong:
        raise ConfigError(f"none of the weights of {source} fits")
    tensors = net.state_dict()
    for name in weights.keys() - wrong:
        # A tied head is the embedding. Those of the source may differ, if it has not tied them.
        if name != "head.weight" or not net.cfg.tie_embeddings:
            assign(tensors[name], weights[name])
    return [name for name in wrong if name in tensors]
