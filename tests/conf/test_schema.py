"""Every YAML composes and builds, and the schema knows every key of it."""

import copy

import pytest
import torch
from conftest import ENCODINGS, ROOT

from conf.cli import compose as composed
from conf.schema import ConfigError, check, flatten
from model.gpt import GPT

REQUIRED = {"text": ["data.files=*.txt"], "hf": ["data.path=parquet"]}


def choices():
    for group in sorted(path for path in (ROOT / "conf").iterdir() if path.is_dir()):
        for path in sorted(group.rglob("*.yaml")):
            yield group.name, str(path.relative_to(group).with_suffix(""))


@pytest.mark.parametrize(("group", "choice"), list(choices()))
def test_every_yaml_composes_and_builds(group, choice):
    values = composed(f"{group}={choice}", *(REQUIRED.get(choice, []) if group == "data" else []))
    cfg = check(values)
    if group in ("pe", "data"):
        assert values[group]["name"] == choice
    with torch.device("meta"):
        net = GPT(cfg.model, cfg.pe, vocab_size=257, train_len=cfg.train_len)
    assert net.n_parameters()["total"] > 0


def test_presets_have_the_sizes_they_claim():
    def parameters(preset: str, vocab_size: int) -> int:
        cfg = check(composed(f"model={preset}", "pe=nope"))
        with torch.device("meta"):
            return GPT(cfg.model, cfg.pe, vocab_size=vocab_size, train_len=1024).n_parameters()["total"]

    assert parameters("tiny", 257) == pytest.approx(0.8e6, rel=0.05)
    # GPT-2 has 124.4M: 0.8M of them are positions, 0.1M biases; 47 rows of ours pad the vocabulary.
    assert parameters("small", 50257) == pytest.approx(123.6e6, rel=0.002)
    assert parameters("llama_tiny", 257) == pytest.approx(0.8e6, rel=0.1)


def all_keys():
    for name in ("code", "text", "hf", "flip_flop", "selective_copy", "counting", "recall"):
        yield from (
            (key, name, "yarn") for key in flatten(composed(f"data={name}")) if name == "code" or "data." in key
        )
    for name in ENCODINGS:
        yield from ((key, "code", name) for key in flatten(composed(f"pe={name}")) if key.startswith("pe."))
    yield from ((key, "code", "yarn") for key in ("logger.project", "logger.mode"))


@pytest.mark.parametrize(("key", "data", "pe"), sorted(k for k in set(all_keys()) if "_target_" not in k[0]))
def test_a_letter_too_many_in_any_key_is_found(key, data, pe):
    logger = ["logger=wandb"] if key.startswith("logger") else []
    values = composed(f"data={data}", f"pe={pe}", *REQUIRED.get(data, []), *logger)
    section = values
    *path, last = key.split(".")
    for part in path:
        section = section[part]
    section[last + "z"] = copy.copy(section[last])
    with pytest.raises(ConfigError, match=f"{key}z: there is no such key") as caught:
        check(values)
    if len(last) > 1:
        assert f"did you mean {key}?" in str(caught.value)


@pytest.mark.parametrize("key", sorted(flatten(composed("logger=wandb"))))
def test_a_value_of_another_type_is_found(key):
    values = composed("logger=wandb")
    *path, last = key.split(".")
    section = values
    for part in path:
        section = section[part]
    section[last] = {"a": "mapping"}
    with pytest.raises(ConfigError) as caught:
        check(values)
    assert key in str(caught.value)


def test_the_name_tells_encoding_data_and_seed():
    assert check(composed("pe=cope")).name == "cope-code"
    assert check(composed("pe=cope", "seed=3")).name == "cope-code-s3"
    assert check(composed("pe=cope", "name=mine")).name == "mine"


def test_several_mistakes_are_reported_at_once():
    values = composed()
    values["trainer"]["max_steps"] = 0
    values["pe"]["scale"] = "four"
    with pytest.raises(ConfigError) as caught:
        check(values)
    assert "trainer.max_steps=0" in str(caught.value)
    assert "pe.scale='four'" in str(caught.value)


def test_an_experiment_sets_and_the_command_line_overrides():
    cfg = check(composed("experiment=quick", "pe=cope", "trainer.max_steps=7"))
    assert (cfg.name, cfg.trainer.max_steps, cfg.trainer.val_every) == ("cope-code-quick", 7, 50)
