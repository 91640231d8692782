"""Every YAML composes and builds, and the schema knows every key of it."""

import functools

import pytest
import torch
import yaml
from conftest import ENCODINGS, ROOT

from conf.schema import flatten
from model.gpt import GPT
from model.size import n_parameters
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check, resolve
from ropewalk.training.console import layers

REQUIRED = {"text": ["data.files=*.txt"], "hf": ["data.path=parquet"]}
CHOICES = [(path.parent.name, path.stem) for path in sorted((ROOT / "conf").glob("*/*.yaml"))]
values_of = functools.cache(train_values)  # composing takes long


def size_of(cfg, vocab_size, train_len):
    """Parameters of the network that a configuration describes."""
    with torch.device("meta"):
        net = GPT(cfg.model, cfg.pe, vocab_size=vocab_size, train_len=train_len)
    return n_parameters(net)["total"]


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_yaml_composes_and_builds(group, choice):
    """What is resolved has nothing left to choose: a network that takes over the weights chooses no other value."""
    values = values_of(f"{group}={choice}", *REQUIRED.get(choice, []))
    cfg = resolve(values)
    if group in ("pe", "data"):
        assert values[group]["name"] == choice

    assert size_of(cfg, 257, cfg.train_len) > 0

    written = yaml.safe_load(yaml.safe_dump(cfg.model_dump()))  # as in a run directory
    assert check(written) == cfg

    longer = {"train_len": 2 * cfg.train_len, "pe": cfg.pe, "stages": []}
    assert check(values | longer).pe == cfg.pe


# GPT-2 has 124.4M: 0.8M of them are positions, 0.1M biases; 47 rows of ours pad the vocabulary.
@pytest.mark.parametrize(
    ("preset", "vocab", "size"),
    [
        ("tiny", 257, 0.82e6),
        ("small", 50257, 123.6e6),
    ],
)
def test_presets_have_the_sizes_they_claim(preset, vocab, size):
    cfg = check(train_values(f"model={preset}", "pe=nope"))
    assert size_of(cfg, vocab, 1024) == pytest.approx(size, rel=0.002)


def changed(values, key, value):
    """Nested `values` with another value of the dotted key."""
    first, _, rest = key.partition(".")
    if rest:
        value = changed(values[first], rest, value)
    return values | {first: value}


OPTIONS = [(group, choice) for group, choice in CHOICES if group == "data"]
OPTIONS += [("pe", name) for name in ENCODINGS]
OPTIONS.remove(("pe", "hybrid"))  # another word beside the parts of a pattern is another part


@pytest.mark.parametrize(("group", "choice"), OPTIONS)
def test_a_letter_too_many_in_an_option_is_found(group, choice):
    values = values_of(f"{group}={choice}", *REQUIRED.get(choice, []))
    *_, last = values[group]  # the same code looks at all of them
    key = f"{group}.{last}"
    with pytest.raises(ValueError, match=f"{key}z: there is no such key; did you mean {key}"):
        check(changed(values, f"{key}z", 1))


def test_a_letter_too_many_in_any_other_key_is_found():
    values = train_values("logger=wandb")
    for key in flatten(values):
        if key.startswith(("pe.", "data.")):
            continue
        with pytest.raises(ValueError, match=f"{key}z: there is no such key; .*{key}"):
            check(changed(values, f"{key}z", 1))


def test_a_value_of_another_type_is_found():
    values = train_values("logger=wandb", "pe=yarn")
    for key in flatten(values):
        with pytest.raises(ValueError, match=key):
            check(changed(values, key, {"a": "mapping"}))


def test_parts_of_a_pattern_are_encodings():
    """{pe: NAME, OPTION: VALUE} becomes the options of conf/pe/NAME.yaml with the given ones in their place."""
    cfg = resolve(train_values("pe=hybrid", "pe.local.pe=yarn", "pe.local.window=32", "+pe.local.base=500.0"))
    alone = resolve(train_values("pe=yarn", "pe.window=32", "pe.base=500.0"))

    assert cfg.pe["local"] == alone.pe
    assert cfg.pe["local"]["original_len"] == 128  # null in the YAML: resolved like that of any encoding
    assert cfg.pe["global"] == resolve(train_values("pe=nope")).pe
    assert layers(cfg.pe, 6) == "yarn (window 32) x3, nope x1, yarn (window 32) x2"


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


def test_a_configuration_is_frozen():
    """What is written into the run directory is what trains."""
    cfg = resolve(train_values("stages=[{steps: 1, train_len: 64}]"))
    for section in (cfg, cfg.trainer, cfg.eval, cfg.stages[0]):
        key, *_ = type(section).model_fields
        with pytest.raises(ValueError, match="frozen"):
            setattr(section, key, None)
