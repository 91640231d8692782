"""Every YAML composes and builds, and the schema knows every key of it."""

import re

import pytest
import torch
import yaml
from conftest import ROOT

from conf.errors import flatten
from conf.options import encoding
from conf.schema import GPTConfig
from data.base import IGNORE_INDEX, build_data
from model.gpt import GPT
from ropewalk.app.compose import composed
from ropewalk.app.configure import configure, train_values
from ropewalk.app.resolve import completed, resolve, resolve_encoding, variants

REQUIRED = {"text": ["data.files=*.txt"], "hf": ["data.path=parquet"]}
CHOICES = [(path.parent.name, path.stem) for path in sorted((ROOT / "conf").glob("*/*.yaml"))]


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_yaml_composes_and_builds(group, choice):
    """What is resolved has nothing left to choose: a network that takes over the weights chooses no other value."""
    values = train_values(f"{group}={choice}", *REQUIRED.get(choice, []))
    cfg = resolve(values)
    if group in ("pe", "data"):
        assert values[group]["name"] == choice

    with torch.device("meta"):
        GPT(cfg.model, cfg.pe, vocab_size=257, train_len=cfg.train_len)

    # Written as in a run directory.
    assert completed(yaml.safe_load(yaml.safe_dump(cfg.model_dump()))) == cfg

    longer = {"train_len": 2 * cfg.train_len, "pe": cfg.pe, "stages": []}

    assert completed(values | longer).pe == cfg.pe


def changed(values, key, value):
    """Nested `values` with another value of the dotted key."""
    first, _, rest = key.partition(".")
    if rest:
        value = changed(values[first], rest, value)
    return values | {first: value}


def test_misspelt_keys_and_values_of_another_type_are_found():
    values = train_values("logger=wandb", "pe=yarn")
    for key in flatten(values):
        with pytest.raises(ValueError, match=f"{key}z: no such key; "):
            completed(changed(values, f"{key}z", 1))
        with pytest.raises(ValueError, match=key):
            completed(changed(values, key, 5 if key == "optim.optimizer" else {"a": "mapping"}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainer.devices": "all"}, "trainer.devices='all': it should be a valid integer or 'auto'"),
        ({"objective": "gain"}, "objective='gain': it should be 'validation' or a valid number"),
        ({"stages": [{"step": 2}]}, "stages.0.step: no such key; did you mean stages.0.steps?"),
        ({"model": []}, "model=[]: it should be a valid dictionary"),
    ],
)
def test_a_message_names_all_that_is_valid(values, message):
    cfg = train_values()
    for key, value in values.items():
        cfg = changed(cfg, key, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        completed(cfg)


def test_parts_of_a_pattern_are_encodings():
    """{pe: NAME, OPTION: VALUE} becomes the options of conf/pe/NAME.yaml with the given ones in their place."""
    cfg = resolve(train_values("pe=hybrid", "pe.local.pe=yarn", "pe.local.window=32", "+pe.local.base=500.0"))
    alone = resolve(train_values("pe=yarn", "pe.window=32", "pe.base=500.0"))

    assert cfg.pe["local"] == alone.pe
    assert cfg.pe["local"]["original_len"] == 128  # null in the YAML: resolved like that of any encoding
    assert cfg.pe["global"] == resolve(train_values("pe=nope")).pe


def test_a_part_of_a_pattern_keeps_the_options_that_are_not_given():
    read = encoding("olmo3")
    expected = read | {"global": read["global"] | {"scale": 16.0}}

    assert encoding({"pe": "olmo3", "global": {"scale": 16.0}}) == expected


def test_variants_are_resolved():
    """A RoPE is never without one; the longest of eval.lengths decides a scale that is not given."""
    assert [pe["name"] for pe in resolve(train_values()).eval.variants] == ["yarn"]
    assert resolve(train_values("pe=alibi")).eval.variants == []
    assert resolve(train_values("pe.window=128", "train_len=128")).eval.variants == []  # no scale changes it

    cfg = resolve(
        train_values(
            "pe.base=500", "pe.window=64", "eval.variants=[linear,{pe:ntk,scale:2},{pe:yarn,original_len:null}]"
        )
    )
    linear, ntk, yarn = cfg.eval.variants
    expected = {"name": "linear", "base": 500.0, "window": 64, "scale": 8.0}

    assert linear | expected == linear
    assert (yarn["scale"], yarn["original_len"]) == (8.0, 128)
    assert ntk["name"] == "ntk"
    assert repr(ntk["scale"]) == "2.0"  # files tell 2 from 2.0

    patterns = resolve(train_values("eval.lengths=[1,4]", "eval.variants=[olmo3,{pe:olmo3,global:{scale:2.0}}]"))

    assert [pe["global"]["scale"] for pe in patterns.eval.variants] == [4.0, 2.0]


def test_a_quarter_of_the_shortest_text_is_scored_unless_asked_otherwise():
    assert completed(train_values("train_len=64", "eval.lengths=[4,0.5]")).target_tokens == 8
    assert completed(train_values("eval.target_tokens=5")).target_tokens == 5


MODEL = GPTConfig(n_layer=2, n_head=2, dim=16).model_dump()


def read(trained, wanted):
    pe, _ = resolve_encoding(encoding(trained), GPTConfig(**MODEL), 16)
    description = {"model": MODEL, "pe": pe, "train_len": 16, "original_len": 16}
    return variants(description, [wanted])


@pytest.mark.parametrize(
    ("trained", "wanted"),
    [
        ("relative", {"pe": "relative", "max_distance": 3}),
        ("relative", {"pe": "relative_capped", "max_distance": 3}),
        ("cope", {"pe": "cope", "npos_max": 8}),
        ("cope", {"pe": "cope", "shared": True}),
        ("cope", {"pe": "cope", "gates": "projection"}),
        ("t5", {"pe": "t5", "num_buckets": 8}),
    ],
)
def test_options_that_change_the_parameters_cannot_read_them(trained, wanted):
    """They would be read under the new name all the same, since their names fit."""
    with pytest.raises(ValueError, match="whose parameters have other names or shapes; fine-tune"):
        read(trained, wanted)


FOLDER = ROOT / "conf" / "experiment"
EXPERIMENTS = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.yaml"))
DATA = sorted(path.stem for path in (ROOT / "conf" / "data").glob("*.yaml") if "@package" in path.read_text())


@pytest.fixture
def text(tmp_path) -> dict:
    """Options of a text of ours, in place of a download."""
    lines = [f"{i} knots in a rope\n" for i in range(8_000)]
    (tmp_path / "corpus.txt").write_text("".join(lines))
    return {
        "name": "text",
        "_target_": "data.text.TextFiles",
        "files": f"{tmp_path}/*.txt",
        "tokenizer": "bytes",
        "cache_dir": str(tmp_path / "cache"),
        "val_fraction": 0.5,
        "document_bytes": 16_384,
    }


@pytest.mark.parametrize(
    "option", [*(f"experiment={name}" for name in EXPERIMENTS), *(f"data={name}" for name in DATA)]
)
def test_every_experiment_has_samples(option, text):
    """At the length of training, and at every length it is measured at."""
    with composed("train", option) as values:
        cfg = configure(values)
    is_text = "data.text." in cfg.data["_target_"]
    data = build_data(text if is_text else cfg.data)
    data.prepare()
    x, y = data.train_batch([0, 1], cfg.train_len, cfg.seed)

    assert x.shape == y.shape == (2, cfg.train_len)

    sets = data.eval_sets(cfg.lengths, target_tokens=cfg.target_tokens, sequences=2)

    assert {part.length for part in sets} == set(cfg.lengths)

    for part in [*sets, data.validation(cfg.train_len, cfg.trainer.val_tokens)]:
        _, y = part.batch(0, 1)

        assert (y != IGNORE_INDEX).any()


@pytest.mark.parametrize("name", DATA)
def test_data_bring_settings_beneath_an_experiment_and_the_command_line(name):
    own = train_values(f"data={name}")
    steps = own["trainer"]["max_steps"]

    assert steps != train_values()["trainer"]["max_steps"]

    own["trainer"]["max_steps"] = 5

    assert train_values(f"data={name}", "trainer.max_steps=5") == own

    quick = train_values(f"data={name}", "experiment=quick")

    assert quick["trainer"]["max_steps"] == 100
    assert quick["optim"]["lr"] == own["optim"]["lr"]
