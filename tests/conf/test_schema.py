"""Every YAML composes and builds, and the schema knows every key of it."""

import pytest
import torch
import yaml
from conftest import ROOT

from conf.errors import flatten
from model.gpt import GPT
from ropewalk.app.configure import train_values
from ropewalk.app.resolve import check, resolve

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
    assert check(yaml.safe_load(yaml.safe_dump(cfg.model_dump()))) == cfg

    longer = {"train_len": 2 * cfg.train_len, "pe": cfg.pe, "stages": []}

    assert check(values | longer).pe == cfg.pe


def changed(values, key, value):
    """Nested `values` with another value of the dotted key."""
    first, _, rest = key.partition(".")
    if rest:
        value = changed(values[first], rest, value)
    return values | {first: value}


def test_a_letter_too_many_in_a_key_and_a_value_of_another_type_are_found():
    values = train_values("logger=wandb", "pe=yarn")
    for key in flatten(values):
        with pytest.raises(ValueError, match=f"{key}z: no such key; "):
            check(changed(values, f"{key}z", 1))
        with pytest.raises(ValueError, match=key):
            check(changed(values, key, 5 if key == "optim.optimizer" else {"a": "mapping"}))


def test_parts_of_a_pattern_are_encodings():
    """{pe: NAME, OPTION: VALUE} becomes the options of conf/pe/NAME.yaml with the given ones in their place."""
    cfg = resolve(train_values("pe=hybrid", "pe.local.pe=yarn", "pe.local.window=32", "+pe.local.base=500.0"))
    alone = resolve(train_values("pe=yarn", "pe.window=32", "pe.base=500.0"))

    assert cfg.pe["local"] == alone.pe
    assert cfg.pe["local"]["original_len"] == 128  # null in the YAML: resolved like that of any encoding
    assert cfg.pe["global"] == resolve(train_values("pe=nope")).pe


def test_variants_are_resolved():
    """A RoPE is never without one; the longest of eval.lengths decides a scale that is not given."""
    assert [pe["name"] for pe in resolve(train_values()).eval.variants] == ["yarn"]
    assert resolve(train_values("pe=alibi")).eval.variants == []

    cfg = resolve(train_values("pe.base=500", "pe.window=64", "eval.variants=[linear,{pe:ntk,scale:2}]"))
    linear, ntk = cfg.eval.variants
    expected = {"name": "linear", "base": 500.0, "window": 64, "scale": 8.0}

    assert linear | expected == linear
    assert ntk["name"] == "ntk"
    assert repr(ntk["scale"]) == "2.0"  # files tell 2 from 2.0


def test_a_quarter_of_the_shortest_text_is_scored_unless_asked_otherwise():
    assert check(train_values("train_len=64", "eval.lengths=[4,0.5]")).target_tokens == 8
    assert check(train_values("eval.target_tokens=5")).target_tokens == 5
