"""Every YAML composes and builds, and the schema knows every key of it."""

import copy
import functools

import pytest
import torch
import yaml
from conftest import ENCODINGS, ROOT

from conf.schema import ConfigError, flatten
from model.gpt import GPT
from model.size import n_parameters
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check, resolve
from ropewalk.training.console import layers

REQUIRED = {"text": ["data.files=*.txt"], "hf": ["data.path=parquet"]}
DATA = sorted(path.stem for path in (ROOT / "conf" / "data").glob("*.yaml"))


def choices():
    for group in ("data", "eval", "experiment", "logger", "model", "pe", "trainer"):
        for path in sorted((ROOT / "conf" / group).rglob("*.yaml")):
            yield group, str(path.relative_to(ROOT / "conf" / group).with_suffix(""))


@pytest.mark.parametrize(("group", "choice"), list(choices()))
def test_every_yaml_composes_and_builds(group, choice):
    values = train_values(f"{group}={choice}", *(REQUIRED.get(choice, []) if group == "data" else []))
    cfg = resolve(values)
    if group in ("pe", "data"):
        assert values[group]["name"] == choice
    with torch.device("meta"):
        net = GPT(cfg.model, cfg.pe, vocab_size=257, train_len=cfg.train_len)
    assert n_parameters(net)["total"] > 0
    written = yaml.safe_load(yaml.safe_dump(cfg.model_dump()))  # as in a run directory
    assert check(written) == cfg


# GPT-2 has 124.4M: 0.8M of them are positions, 0.1M biases; 47 rows of ours pad the vocabulary.
@pytest.mark.parametrize(("preset", "vocab", "size"), [("tiny", 257, 0.82e6), ("small", 50257, 123.6e6)])
def test_presets_have_the_sizes_they_claim(preset, vocab, size):
    cfg = check(train_values(f"model={preset}", "pe=nope"))
    with torch.device("meta"):
        net = GPT(cfg.model, cfg.pe, vocab_size=vocab, train_len=1024)
    assert n_parameters(net)["total"] == pytest.approx(size, rel=0.002)


def mutated(values: dict, key: str, change) -> dict:
    """A copy of nested `values`, in which `change` was called with the section of the dotted key and its last word."""
    values = copy.deepcopy(values)
    *path, last = key.split(".")
    change(functools.reduce(dict.__getitem__, path, values), last)
    return values


@pytest.mark.parametrize("data", DATA)
def test_a_letter_too_many_in_any_key_is_found(data):
    """In those of the data and, each with another data, in a share of the encodings; in the others once."""
    for pe in ENCODINGS[DATA.index(data) :: len(DATA)]:
        values = train_values(f"data={data}", f"pe={pe}", *REQUIRED.get(data, []), "logger=wandb")
        check(values)
        sections = ("pe.", "data.") if data != DATA[0] else ""
        for key in (key for key in flatten(values) if key.startswith(sections)):
            last = key.rpartition(".")[2]
            if last in ("_target_", "pattern") or (key.count(".") > 1 and not key.startswith("pe.")):
                continue
            wrong = mutated(values, key, lambda section, last: section.update({last + "z": section[last]}))
            with pytest.raises(ValueError, match=f"{last}z") as caught:
                check(wrong)
            if pe != "hybrid" or key.count(".") != 1:  # another word beside the parts is another part
                assert f"{key}z: there is no such key" in str(caught.value)
                assert f"did you mean {key}?" in str(caught.value) or len(last) == 1


def test_a_value_of_another_type_is_found():
    values = train_values("logger=wandb", "pe=yarn")
    for key in flatten(values):
        wrong = mutated(values, key, lambda section, last: section.update({last: {"a": "mapping"}}))
        with pytest.raises(ValueError, match=key):
            check(wrong)


def test_several_mistakes_are_reported_at_once():
    values = train_values("pe=yarn")
    values["trainer"]["max_steps"] = -1
    values["optim"]["lr"] = "much"
    with pytest.raises(ConfigError, match=r"optim\.lr='much'.*\n.*trainer\.max_steps=-1"):
        check(values)


def test_parts_of_a_pattern_are_encodings():
    """{pe: NAME, OPTION: VALUE} becomes the options of conf/pe/NAME.yaml with the given ones in their place."""
    cfg = resolve(train_values("pe=hybrid", "pe.local.pe=yarn", "pe.local.window=32", "+pe.local.base=500.0"))
    alone = resolve(train_values("pe=yarn", "pe.window=32", "pe.base=500.0"))
    assert cfg.pe["local"] == alone.pe
    assert cfg.pe["local"]["original_len"] == 128  # null in the YAML: resolved like that of any encoding
    assert cfg.pe["global"] == resolve(train_values("pe=nope")).pe
    assert layers(cfg.pe, 6) == "yarn (window 32) x3, nope x1, yarn (window 32) x2"
    assert layers(alone.pe, 6) == "yarn (window 32) x6"


def test_variants_are_resolved():
    assert [pe["name"] for pe in resolve(train_values()).eval.variants] == ["yarn"]  # a RoPE is never without one
    assert resolve(train_values("pe=alibi")).eval.variants == []
    cfg = resolve(train_values("pe.base=500", "pe.window=64", "eval.variants=[linear,{pe:ntk,scale:2}]"))
    assert [(pe["name"], str(pe["base"]), pe["window"], str(pe["scale"])) for pe in cfg.eval.variants] == [
        ("linear", "500.0", 64, "8.0"),  # the longest of eval.lengths
        ("ntk", "500.0", 64, "2.0"),  # as files tell 2 from 2.0
    ]


def test_a_configuration_is_frozen():
    cfg = resolve(train_values("stages=[{steps: 1, train_len: 64}]"))
    for section, key in ((cfg, "name"), (cfg.trainer, "precision"), (cfg.eval, "variants"), (cfg.stages[0], "pe")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(section, key, None)


@pytest.mark.parametrize("pe", ENCODINGS)
def test_nothing_is_left_to_choose_in_what_is_recorded(pe):
    """Else a network that takes over the weights at another length would choose another value."""
    values = train_values(f"pe={pe}")
    first = check(values)
    again = check(values | {"train_len": 2 * first.train_len, "pe": first.pe})
    assert again.pe == first.pe
