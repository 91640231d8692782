"""Starting from a trained model: its configuration lies beneath the user's choices, in a merge that Hydra makes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from app.cli import composed, encoding, plain, recompose
from app.resolve import check, resolve_encoding
from app.run_dir import RunDir, data_options, find, load_config
from conf.schema import Config, ConfigError
from data.base import Data, build_data
from model import hf, position, serialization
from model.gpt import GPT, parse_config
from model.position.base import NO_ENCODING

Options = Mapping[str, Any]
_NOT_SHARED = ("name", "_target_", "scale", "train_scale", "attention_factor")  # the last belongs to the scale
_OF_TRAINING = ("dropout", "init_std")  # of the architecture: another value fits the same weights


def train_values(*overrides: str) -> dict[str, Any]:
    """The values of train.py's command line with these overrides, not yet checked."""
    with composed("config", *overrides) as config:
        return merged(plain(config))


def resolve(values: Options) -> Config:
    """The checked configuration, with resolved eval.variants. Raises ConfigError: a line for each mistake."""
    cfg = check(values)
    trained = cfg.model_dump(include={"model", "pe", "train_len"})
    trained["original_len"] = original_len(cfg, base_model(cfg.init_from))
    wanted = cfg.eval.variants
    if wanted is None:
        cls = position.resolve(cfg.pe["_target_"]) if "_target_" in cfg.pe else None  # None: a pattern
        wanted = [*vars(cls).get("zero_shot", ())] if cls else []  # vars: subclasses do not inherit it
    cfg.eval.variants = [*variants(trained, wanted, max(cfg.eval.lengths))]
    return cfg


def base_model(source: str | None) -> dict[str, Any]:
    """What model.json says of the model in the folder `source`, or would say of that of transformers,
    hf:FOLDER_OR_HUB_ID; and its `source`. Empty for None. Raises ValueError: there is none, or it cannot be read."""
    if source is None:
        return {}
    about = hf.read_model(source).describe() if source.startswith("hf:") else serialization.describe(source)
    return about | {"source": source}


def merged(values: dict[str, Any]) -> dict[str, Any]:
    """Values that Hydra has composed, over those of the model that `init_from` names: its architecture, encoding and
    tokenizer unless the user chose one, and the options that both encodings have, but for the scale. Raises ValueError:
    there is no such model, a choice contradicts its weights, or they belong to another family of encodings."""
    if (source := values["init_from"]) is None:
        return values | {"pe": encoding(values.get("pe", {}))}
    source = str(source)
    own = {"tokenizer": source} if source.startswith("hf:") else data_options(find(source), "")
    base = base_model(source)
    data = {key: own[key] for key in own if key == "tokenizer" and key in values["data"]}
    groups = {"model": base["model"], "pe": base["pe"]}
    chosen = recompose({}, groups).get("pe", {})
    values = recompose({"pe": _shared(base, encoding(chosen)), "data": data}, groups, *recipe(source))
    values["pe"] = encoding(values["pe"])
    if not values["init_partial"]:
        for key, value in values["model"].items():
            if value != (theirs := base["model"].get(key)) and key not in _OF_TRAINING:
                remedy = "leave it out, or take what fits with init_partial=true"
                raise ConfigError(f"model.{key}={value} contradicts {source}, which has {theirs}: {remedy}")
        _readable(base, values["pe"], remedy="init_partial=true starts from them all the same", dropping=True)
    name = f"{Path(source).name}-{values['pe'].get('name')}-{values['train_len']}"
    return values | {"name": values["name"] or name + (f"-s{values['seed']}" if values["seed"] else "")}


def recipe(source: str | None) -> list[str]:
    """The experiment that is taken where a run starts from a model of transformers and none is chosen."""
    chosen = HydraConfig.get().runtime.choices.get("experiment")
    return ["experiment=extend"] if str(source).startswith("hf:") and not chosen else []


def _shared(base: Options, chosen: Options) -> dict[str, Any]:
    """Those options of `chosen` that the base model's encoding decides, part by part."""
    old, shared = position.parts(base["pe"]), {}
    for name, part in position.parts(chosen).items():
        own = old.get(name, old.get("", {}))
        shared[name] = {key: value for key, value in own.items() if key in part and key not in _NOT_SHARED}
        if "original_len" in part:
            shared[name]["original_len"] = own.get("original_len") or base["original_len"]
    return shared.get("", shared)


def variants(trained: Options, wanted: Iterable[str | Options], longest: float | None = None) -> list[dict[str, Any]]:
    """Resolved options of the encodings `wanted`, which read the weights of a trained model zero-shot: each a name,
    {pe: NAME, OPTION: VALUE, ...}, or resolved already. Options that are not given are the trained encoding's, if it
    has them; the scale is that of the `longest` text, a multiple of train_len, or else its YAML's. Raises ConfigError:
    an encoding or option does not exist, or an encoding cannot read these weights."""
    found = []
    for spec in wanted:
        given = {"pe": spec} if isinstance(spec, str) else spec
        pe = encoding(given)
        if "pe" in given:
            pe = pe | _shared(trained, pe) | {key: value for key, value in given.items() if key in pe}
            if longest and "scale" not in given and pe.get("scale", 1) > 1:  # dynamic_ntk's is 1 for any length
                pe["scale"] = max(1.0, longest * trained["train_len"] / pe["original_len"])
        found.append(_readable(trained, pe, remedy="fine-tune with train.py init_from=... instead"))
    return found


def _readable(trained: Options, pe: Options, *, remedy: str, dropping: bool = False) -> dict[str, Any]:
    """The resolved options `pe`. Raises ConfigError if this encoding cannot read the weights of the trained model.
    With `dropping` NoPE may take over those of any encoding without parameters, to be trained on: DroPE."""
    model, length = parse_config(trained["model"]), trained["train_len"]
    (_, old), (found, new) = (resolve_encoding(options, model, length) for options in (trained["pe"], pe))
    allowed = dropping and new.family == NO_ENCODING and old.n_parameters()["position"] == 0
    if old.family != new.family and not allowed:
        theirs = f"{trained['pe']['name']} ({old.family})"
        raise ConfigError(f"pe={pe['name']} ({new.family}) cannot read weights trained with {theirs}; {remedy}")
    return found


def evaluation(path: Path, pe: Options | None) -> Config:
    """The configuration of the run at `path`, with the `eval` of the command line over its own. With `pe`, which the
    command line chose, that encoding is the only variant. Raises ValueError."""
    values, trained = load_config(path).model_dump(), serialization.describe(path)
    if values["trainer"]["max_steps"] and not (path / "training.json").is_file():
        # The weights may be those of a shorter training, which is being continued.
        raise ConfigError(f"{path} has not finished training: the same command of train.py resumes it")
    reader = chosen_reader(trained, pe)
    asked = recompose({"eval": values["eval"]}, {})
    cfg = check(values | {"eval": asked["eval"], "runs_dir": str(path.parent), "name": path.name})
    wanted = [reader] if reader else cfg.eval.variants or []
    cfg.eval.variants = [*variants(trained, wanted, max(cfg.eval.lengths))]
    return cfg


def chosen_reader(trained: Options, pe: Options | None) -> dict[str, Any] | None:
    """The encoding `pe` of a program's command line, as one of the `variants` of a trained model."""
    if pe is None:
        return None
    values = recompose({"pe": _shared(trained, encoding(pe))}, {})
    return variants(trained, [encoding(values["pe"])])[0]


def opened(run: str | Path, cache_dir: str = "prepared") -> Path:
    """The run directory `run`; or one of 0 steps in runs/, made of the model of transformers that `run` names. Raises
    ValueError: there is neither, or the model cannot be read."""
    if not str(run).startswith("hf:"):
        return find(run)
    source = str(run).replace("'", r"\'")
    base = base_model(str(run))
    said = f"init_from='{source}'", f"train_len={base['train_len']}", "trainer.max_steps=0"
    cfg = resolve(train_values(*said, f"data.cache_dir='{cache_dir}'"))
    made = RunDir(cfg)
    if not (made.path / serialization.DESCRIPTION).is_file():
        data = build_data(cfg.data)
        net = GPT(cfg.model, cfg.pe, vocab_size=vocab_size(data, base), train_len=cfg.train_len)
        load_weights(net, base, partial=False)
        data.prepare(progress=True)
        with made.lock():
            made.create(data.identity(), data.tokenizer_files())
            length = original_len(cfg, base)
            serialization.save(net, made.path, pe=cfg.pe, tokenizer=data.identity(), original_len=length)
    made.check()
    print(f"{run} is the run {made.path}")
    return made.path


def original_len(cfg: Config, base: Options) -> int:
    """The longest text that the weights of a run, or those it began with, were trained to read without a scaling."""
    return max(cfg.train_len, base.get("original_len", 0))


def vocab_size(data: Data, base: Options) -> int:
    """Tokens of a network that starts from the model `base`, if any: the data may use fewer than the model has.
    Raises ValueError: the data have other tokens."""
    known, size = base.get("tokenizer"), int(base.get("vocab_size", data.vocab_size))
    others = known and not data.tokenizer_identity().items() <= known.items()
    if others or data.vocab_size > size:
        what = f"{base['source']} has a vocabulary of {size} tokens, the data another one of {data.vocab_size}"
        raise ConfigError(f"{what}: leave out data.tokenizer, so that it is the model's own, or choose its data")
    return size


def load_weights(net: GPT, base: Options, *, partial: bool) -> list[str]:
    """Give `net` the weights of the model `base`; returns the tensors that keep their initial values. Raises
    ValueError: they cannot be read, or a tensor fits no tensor of the other, or with `partial` none does; names them.
    """
    source = base["source"]
    if net.family == NO_ENCODING and base["pe"]["name"] != "nope":
        print(f"DroPE: weights trained with {base['pe']['name']} go on without positions, and have to adapt to that")
    weights = (
        hf.read_model(source).state_dict() if source.startswith("hf:") else serialization.read_weights(source, base)
    )
    wrong = serialization.mismatched_tensors(net, weights)
    if wrong and not partial:
        reason = f"{', '.join(wrong[:5])} differ in name or shape; init_partial=true takes those that fit"
        raise ConfigError(f"the weights of {source} do not fit: {reason}")
    if not weights.keys() - wrong:
        raise ConfigError(f"none of the weights of {source} fits")
    net.load_state_dict({name: value for name, value in weights.items() if name not in wrong}, strict=False)
    return [name for name in wrong if name in net.state_dict()]
