"""Starting from a trained model: its configuration lies beneath the user's choices, in a merge that Hydra makes."""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from conf.compose import composed, encoding, plain, recompose
from conf.run_dir import check_identity, find, read_config
from conf.schema import Config, ConfigError, check, resolve_encoding, unknown_key
from data.base import Data
from model import hf, position, serialization
from model.gpt import GPT, parse_config

_NOT_SHARED = ("name", "_target_", "scale", "train_scale", "attention_factor")  # the last belongs to the scale
_OF_TRAINING = ("dropout", "init_std")  # of the architecture: another value fits the same weights


def compose(*overrides: str) -> dict[str, Any]:
    """The values of train.py's command line with these overrides, not yet checked."""
    with composed("config", *overrides) as config:
        return merged(plain(config))


def resolve(values: Mapping[str, Any]) -> Config:
    """The checked configuration, with resolved eval.variants. Raises ConfigError: a line for each mistake."""
    cfg = check(values)
    trained = {"model": cfg.model.model_dump(), "pe": cfg.pe, "train_len": cfg.train_len}
    if cfg.eval.variants is not None:
        cfg.eval.variants = [*variants(trained, cfg.eval.variants)]
        return cfg
    cfg.eval.variants = []
    for name in position.resolve(cfg.pe["_target_"]).zero_shot if "_target_" in cfg.pe else ():
        with contextlib.suppress(ConfigError):  # a subclass may belong to another family
            longest = max(1.0, *cfg.eval.lengths)
            cfg.eval.variants += variants(trained, [{"pe": name, "scale": longest}])
    return cfg


def merged(values: dict[str, Any]) -> dict[str, Any]:
    """Values that Hydra has composed, over the model that `init_from` names, with the options of a named encoding.

    The architecture is the base model's. So is the encoding, unless the user chose one; options that both encodings
    have are the base model's unless given, but for the scale. original_len is the length at which the line of models
    began. A run that has begun can do without its base model: its own record takes the place.

    Raises ValueError: there is no model at `init_from` that can be read, a choice contradicts its weights, or they
    belong to another family of encodings.
    """
    if (source := values["init_from"]) is None:
        return values | {"pe": encoding(values.get("pe", {}))}
    try:
        base = describe(str(source))
    except ValueError:
        run = Path(values["runs_dir"], values["name"] or _default_name(values))
        base = read_config(run) if (run / "config.yaml").is_file() and not values["overwrite"] else {}
        if base.get("init_from") != source:
            raise
    groups = {"model": base["model"], "pe": base["pe"]}
    chosen = recompose({}, groups).get("pe", {})
    values = recompose({"pe": _shared(base, encoding(chosen))}, groups)
    values["pe"] = encoding(values["pe"])
    if not values["init_partial"]:
        for key, value in values["model"].items():
            if value != base["model"].get(key) and key not in _OF_TRAINING:
                raise ConfigError(
                    f"model.{key}={value} contradicts {source}, which has {base['model'].get(key)}: leave it out, or "
                    f"take what fits with init_partial=true"
                )
        _readable(base, values["pe"], remedy="init_partial=true starts from them all the same")
    return values | {"name": values["name"] or _default_name(values)}


def _default_name(values: Mapping[str, Any]) -> str:
    seed = f"-s{values['seed']}" if values["seed"] else ""
    return f"{Path(values['init_from']).name}-{values['pe'].get('name')}-{values['train_len']}{seed}"


def _shared(base: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Those options of `chosen` that the base model's encoding decides, part by part."""
    old, shared = position.parts(base["pe"]), {}
    for name, part in position.parts(chosen).items():
        own = old.get(name, old.get("", {}))
        shared[name] = {key: value for key, value in own.items() if key in part and key not in _NOT_SHARED}
        if "original_len" in part:
            shared[name]["original_len"] = own.get("original_len") or base["train_len"]
    return shared.get("", shared)


def variants(
    trained: Mapping[str, Any], wanted: Iterable[str | Mapping[str, Any]], options: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Encodings that read the weights of a trained model zero-shot, each as resolved options.

    Options that an encoding shares with the trained one are the trained one's, but for the scale and those given.

    Args:
        trained: `pe`, `model` and `train_len` of the trained model, as in model.json.
        wanted: names, or {pe: NAME, OPTION: VALUE, ...}, or options that are resolved already.
        options: given to each of the named encodings that has them.

    Raises:
        ConfigError: an encoding or option does not exist, or an encoding cannot read these weights.
    """
    found, given, known = [], dict(options or {}), set[str]()
    for spec in wanted:
        spec = {"pe": spec} if isinstance(spec, str) else spec
        pe = encoding(spec)
        if "pe" in spec:
            over = {key: value for key, value in {**spec, **given}.items() if key in pe}
            pe = {**pe, **_shared(trained, pe), **over}
        known |= pe.keys()
        found.append(_readable(trained, pe, remedy="fine-tune with train.py init_from=... instead"))
    for key in given.keys() - known:
        raise ConfigError(unknown_key(f"pe.{key}", sorted(known)))
    return found


def _readable(trained: Mapping[str, Any], pe: Mapping[str, Any], *, remedy: str) -> dict[str, Any]:
    """The resolved options `pe`. Raises ConfigError if weights of the trained model mean nothing to this encoding."""
    model, length = parse_config(trained["model"]), trained["train_len"]
    (_, old), (found, new) = (resolve_encoding(options, model, length) for options in (trained["pe"], pe))
    if old.family != new.family:
        raise ConfigError(
            f"pe={pe['name']} ({new.family}) cannot read weights trained with {trained['pe']['name']} ({old.family}); "
            f"{remedy}"
        )
    return found


def evaluation(config: DictConfig) -> tuple[Path, Config, list[dict[str, Any]] | None]:
    """What scripts/evaluate.py is asked for: the run; its configuration, with the `eval` of the run where the command
    line does not say otherwise; and the encoding to measure instead of the run's own and its variants, if chosen.
    Raises ValueError: no such run, or a mistake in the configuration."""
    asked = plain(config)
    if "run" not in asked:
        raise ConfigError("run is missing: the run directory, as in run=runs/rope-code")
    path = find(asked["run"])
    values, trained = read_config(path), serialization.describe(path)
    chosen = {"pe": _shared(trained, encoding(asked["pe"]))} if "pe" in asked else {}
    asked = recompose({"eval": values["eval"], **chosen}, {})
    cfg = check({**values, "eval": asked["eval"], "runs_dir": str(path.parent), "name": path.name})
    cfg.eval.variants = [*variants(trained, cfg.eval.variants or [])] or None
    return path, cfg, variants(trained, [encoding(asked["pe"])]) if chosen else None


def describe(source: str) -> dict[str, Any]:
    """What model.json says of the model `source`, a run directory or hf:FOLDER_OR_HUB_ID. Raises ValueError."""
    if source.startswith("hf:"):
        return hf.load(source).describe()
    if not Path(source).is_dir():
        raise ConfigError(f"init_from={source}: there is no such directory; a model of transformers has hf: before it")
    return serialization.describe(source)


def load_weights(net: GPT, data: Data, source: str, *, partial: bool) -> list[str]:
    """Give `net` the weights of the model that `source` names; returns the tensors that keep their initial values.

    Raises ValueError: they cannot be read, do not fit (unless `partial`), or belong to another vocabulary.
    """
    if not source.startswith("hf:"):
        check_identity(Path(source), data.tokenizer_identity())
        return serialization.initialize(net, serialization.read_weights(source), source, partial=partial)
    if (vocab_size := hf.load(source).vocab_size) != data.vocab_size:
        raise ConfigError(
            f"{source} has a vocabulary of {vocab_size} tokens, the data one of {data.vocab_size}: choose the model's "
            f"own with data.tokenizer"
        )
    return serialization.initialize(net, hf.load(source).state_dict(), source, partial=partial)


def copy_tokenizer(source: str, run: Path) -> None:
    """Copy the tokenizer files of the model that `source` names, if it has any, into the run: export needs them."""
    folder = hf.load(source).folder if source.startswith("hf:") else find(source) / "tokenizer"
    if folder.is_dir():
        hf.copy_tokenizer(folder, run / "tokenizer")
