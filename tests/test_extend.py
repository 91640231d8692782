"""Beginning with the weights of another run: what is inherited, kept, refused."""

import base64
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml
from conftest import rows_of
from hf_models import SIZES, hf_model
from process_helpers import On
from safetensors.torch import load_file

import ropewalk
import train as program
from data.hf_tokenizer import BYTE_OF
from ropewalk.app.run_dir import read_config
from ropewalk.evaluation.results import load_all
from ropewalk.files import read_json
from scripts import evaluate


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def assert_same_weights(run: Path, base: Path) -> None:
    """All that the base has, after a step at a rate of nearly 0."""
    after = weights(run)
    for name, value in weights(base).items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-9)


def part_of(values: dict, like: dict) -> dict:
    """The entries of `values` whose keys `like` has."""
    return {key: values[key] for key in like}


@pytest.fixture
def extend(train):
    """`extend(base, "pe=yarn", ...)` takes one step, at a rate of nearly 0: the run's folder, and what was said."""

    def run(base, *options: str) -> tuple[Path, str]:
        step = "trainer.max_steps=1", "optim.lr=1e-12"
        before = {*train.runs.glob("*/")}
        outcome = train(f"init_from={base}", *step, *options)
        assert outcome.code == 0, outcome.err
        (child,) = {*train.runs.glob("*/")} - before
        return child, outcome.out

    return run


@pytest.fixture
def refused(train):
    """`refused(base, "model.dim=64", ...)` is the error of a run that is not begun."""

    def run(base, *options: str) -> str:
        outcome = train(f"init_from={base}", *options, "name=refused")
        assert outcome.code == 2
        assert not (train.runs / "refused").exists()
        return outcome.err

    return run


def test_two_extensions_keep_the_first_length(straight, extend):
    base = straight("pe=rope", "pe.base=500", "model.n_layer=2")
    expected = {"original_len": 16, "base": 500}
    first, said = extend(base, "pe=yarn", "pe.scale=2", "train_len=32", "eval.lengths=[0.5,1,2]", "name=null")
    assert first.name == "run-yarn-32"
    assert "scale 2" in said.split("original length 16")[0]  # beyond original_len the scale is at work
    assert part_of(read_config(first)["pe"], expected) == expected
    assert read_config(first)["model"]["n_layer"] == 2

    second, _ = extend(first, "pe=yarn", "pe.scale=4", "train_len=64", "eval.lengths=[0.5,1,2]", "name=second")
    assert part_of(read_config(second)["pe"], expected) == expected
    assert read_config(second)["init_from"] == str(first)
    assert {e.variant.scale for e in load_all(second) if e.step} == {4.0}


def test_a_run_measures_the_model_it_starts_from_once(straight, train, monkeypatch):
    """As that model reads, and by the run's encoding: what a run of 0 steps measures of the same weights."""
    yarn = f"init_from={straight('pe=rope')}", "train_len=32", "eval.lengths=[1,2]", "pe=yarn", "pe.scale=2"
    assert train(*yarn, "eval.variants=[rope]", "trainer.max_steps=0", "name=none").code == 0

    expected = {e.variant.pe["name"]: [m.nats for m in e.measured] for e in load_all(train.runs / "none")}

    with monkeypatch.context() as patch:
        On("train:Training.fit", 1, partial(sys.exit, 9))(patch.setattr)
        assert train(*yarn, "name=child").code == 9
    before = load_all(train.runs / "child")
    assert {e.variant.pe["name"]: [m.nats for m in e.measured] for e in before} == expected

    for e in before:
        assert (e.step, e.train_len) == (0, 16)
        assert [m.length for m in e.measured] == [16, 32, 64]  # the model's own training length first

    resumed = train(*yarn, "name=child")
    assert resumed.out.count("measuring lengths") == 1, resumed.err  # after the last step
    assert [e for e in load_all(train.runs / "child") if not e.step] == before


def test_without_a_step_the_training_length_stays(straight, train):
    assert train(f"init_from={straight('pe=rope')}", "trainer.max_steps=0", "name=other-text").code == 0
    described = read_json(train.runs / "other-text" / "model.json")
    assert (described["train_len"], described["original_len"]) == (16, 16)


HYBRID = ("pe=hybrid", "pe.pattern=[local,global]", "model.n_layer=2")


def test_positions_without_parameters_can_be_dropped(straight, extend, refused):
    """DroPE: NoPE goes on with RoPE's weights, here in one part of a pattern; the windows keep their RoPE."""
    base = straight(*HYBRID, "pe.global.pe=rope")
    child, _ = extend(base, *HYBRID, "pe.local.window=4")
    parts = read_config(child)["pe"]
    assert (parts["local"]["name"], parts["global"]["name"]) == ("rope", "nope")
    assert_same_weights(child, base)

    with_parameters = straight(*HYBRID, "pe.global.pe=fox")
    assert "cannot read weights trained with hybrid" in refused(with_parameters, *HYBRID, "pe.local.window=4")


COPE = "pe=cope", "pe.npos_max=20"


def test_an_extension_begins_where_the_base_model_ended(straight, extend):
    base = straight(*COPE)
    child, _ = extend(base)
    assert read_config(child)["pe"]["npos_max"] == 20  # inherited with the encoding
    assert_same_weights(child, base)

    after_a_step = rows_of(child)[-1]["val/loss"]
    assert after_a_step == pytest.approx(rows_of(base)[-1]["val/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pe=cope"], "pe=cope (CoPE) cannot read weights trained with rope (rotary, half layout, 16 channels)"),
        (["pe=rope", "pe.layout=interleaved"], "interleaved layout"),
        (["model.dim=64"], "model.dim=64 contradicts"),
        (["model=tiny"], "contradicts"),  # the program's default, but asked for
        (["model.dim=64", "init_partial=true"], "none of the weights"),
        (["data.tokenizer=VOCABULARY"], "a vocabulary of 257 tokens, the data another one of 257"),
        (["data=flip_flop"], "the data another one of 5"),
    ],
)
def test_what_does_not_fit_is_refused(refused, straight, arguments, message, tmp_path):
    vocabulary = tmp_path / "v.tiktoken"
    reversed_bytes = [f"{base64.b64encode(bytes([i])).decode()} {255 - i}\n" for i in range(256)]
    vocabulary.write_text("".join(reversed_bytes))
    arguments = [argument.replace("VOCABULARY", str(vocabulary)) for argument in arguments]
    assert message in refused(straight("pe=rope"), *arguments)


OWN_FILES = {
    "experiment/sharp.yaml": "# @package _global_\npe: {attention_factor: 1.5}\n",
    "experiment/long.yaml": "# @package _global_\ndefaults: [sharp, _self_, override /pe: yarn]\n"
    "pe: {base: 10000.0, scale: 2.0}\n",
    "experiment/wide.yaml": "# @package _global_\nmodel: {dim: 64}\n",
    "pe/mine.yaml": "defaults: [yarn, _self_]\nname: mine\nscale: 2.0\n",
}


@pytest.mark.parametrize("place", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_choices_of_the_user_s_own_files_count(train, straight, script, refused, tmp_path, place):
    """Of an experiment outside of conf/, by way of the lists of defaults, and of a group of theirs."""
    for name, text in OWN_FILES.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    place = place.format(tmp_path / "mine")
    base = straight("pe=rope", "pe.base=500", "model.n_layer=2")

    def composed(*options):
        asked = train.complete(f"init_from={base}", "train_len=32", "eval.lengths=[0.5,1]", place, *options)
        pe = yaml.safe_load(script(program, *asked, "--cfg", "job").out)["pe"]
        return [pe[key] for key in ("name", "base", "scale", "original_len", "attention_factor")]

    # chosen values win, though that of the base is yarn.yaml's own
    assert composed("experiment=long") == ["yarn", 10_000.0, 2.0, 16, 1.5]
    assert composed("experiment=long", "pe.base=700") == ["yarn", 700.0, 2.0, 16, 1.5]
    assert composed("pe=mine") == ["mine", 500.0, 2.0, 16, None]
    assert "model.dim=64 contradicts" in refused(base, place, "experiment=wide")


def test_a_pattern_is_extended_part_by_part(train, straight, script):
    """The local part keeps its window too, though hybrid.yaml has another."""
    parts = ["pe=hybrid", "pe.local.pe=rope", "pe.local.window=4", "pe.global.pe=rope", "+pe.global.base=500.0"]
    base = straight(*parts, "model.n_layer=4")
    longer = ["train_len=32", "eval.lengths=[0.5,1]", "pe=hybrid", "pe.global.pe=yarn", "+pe.global.scale=2.0"]
    shown = script(program, *train.complete(f"init_from={base}", *longer), "--cfg", "job")
    pe = yaml.safe_load(shown.out)["pe"]
    assert pe["local"] == read_config(base)["pe"]["local"]

    expected = {"base": 500.0, "scale": 2.0, "original_len": 16}
    assert part_of(pe["global"], expected) == expected


def test_init_partial_names_the_weights_that_are_new(straight, extend):
    base = straight("pe=rope")
    child, said = extend(base, "init_partial=true", "pe=cope", "model.n_layer=2")
    assert "initialised at random: blocks.0.position.table, blocks.1.attn.out.weight, " in said
    assert_same_weights(child, base)


def test_the_optimizer_goes_on(straight, extend, refused):
    """Where AdamW's averages hardly change in a step, they are those of the first run, and it counts its steps."""
    base = straight(*COPE)
    child, _ = extend(base, "init_optimizer=true", "optim.beta1=0.999999999", "optim.beta2=0.999999999")
    before = torch.load(base / "checkpoints" / "step=6.ckpt")["optimizer"]
    after = torch.load(child / "checkpoints" / "step=1.ckpt")["optimizer"]
    for name, value in before.items():
        expected = value + 1 if name.endswith("/step") else value
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-9)
    shutil.rmtree(child / "checkpoints")
    assert f"{child.name} has none" in refused(child, "init_optimizer=true")


def small_llama(folder, vocab_size=300, more=()):
    """A Llama of transformers with random weights, and where it lies, with a tokenizer of bytes and special tokens."""
    rope = {"rope_type": "default", "rope_theta": 700.0}
    sizes = SIZES | dict(vocab_size=vocab_size, max_position_embeddings=16, rope_parameters=rope)
    model = hf_model("llama", **sizes)
    model.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(dict(BYTE_OF), []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>", *more])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return model, f"hf:{folder}"


def test_a_run_carries_the_vocabulary_trained_for_it(train, extend, tmp_path):
    """So it is read, and extended, when the corpus, and what was prepared of it, are gone."""
    assert train("data.tokenizer=train:268", "name=base").code == 0

    base = train.runs / "base"
    before = ropewalk.load(base).encode("knots in a rope").tolist()
    assert len(before) < 10

    for i, path in enumerate(sorted(train.corpus.iterdir())):
        path.rename(path.with_suffix(".md")).write_text(f"{i} walks on a rope; " * 40)
    shutil.rmtree(tmp_path / "cache")
    child, _ = extend(base, f"data.files={train.corpus}/*.md")
    for run in (base, child):
        assert ropewalk.load(run).encode("knots in a rope").tolist() == before
    assert read_config(child)["data"]["tokenizer"] == f"{base}/tokenizer/bpe-268.tiktoken"


def test_a_model_of_transformers_is_read_as_it_is(train, script, monkeypatch, tmp_path):
    """Without a training: it becomes a run of no steps, once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.text.stdlib_files", lambda: [(p.name, p) for p in train.corpus.iterdir()])
    theirs, folder = small_llama(tmp_path / "llama")
    settings = ["eval.sequences=2", "eval.lengths=[1,2]", "eval.variants=[ntk]", "device=cpu", f"cache_dir={tmp_path}"]
    outcome = script(evaluate, f"run={folder}", "measures=[lengths]", *settings)
    assert outcome.code == 0, outcome.err

    evaluations = load_all(tmp_path / "runs" / "llama-rope-16")
    assert {(e.variant.label, e.step) for e in evaluations} == {("rope", 0), ("ntk at scale 2", 0)}

    model = ropewalk.load(folder, cache_dir=str(tmp_path))
    with torch.no_grad():
        expected = theirs(torch.tensor([[*b"a rope walk"]])).logits[0]
    torch.testing.assert_close(model.logits("a rope walk"), expected, rtol=1e-4, atol=1e-5)


def test_beginning_with_a_model_of_transformers(script, extend, tmp_path):
    """A Llama trained elsewhere, with its own base, is extended by a recipe of its own, and keeps its tokenizer."""
    theirs, folder = small_llama(tmp_path / "llama")
    child, said = extend(folder, "pe=yarn", "pe.scale=2", "train_len=32")
    assert "experiment=extend" in said

    shown = yaml.safe_load(script(program, f"init_from={folder}", "--cfg", "job").out)
    assert shown["optim"]["lr"] == 3e-4  # not the one of a training from scratch

    expected = {"base": 700.0, "original_len": 16}
    assert part_of(read_config(child)["pe"], expected) == expected

    ours = weights(child)["embedding.weight"]
    torch.testing.assert_close(ours, theirs.model.embed_tokens.weight.detach(), rtol=0, atol=1e-9)
    assert json.loads((child / "model.json").read_text())["vocab_size"] == 300  # of which 258 are used

    (tmp_path / "llama" / "tokenizer.json").unlink()
    assert ropewalk.load(child, cache_dir=str(tmp_path)).encode("a rope").tolist() == [*b"a rope"]


def test_special_tokens_that_a_model_lacks_are_no_matter(refused, extend, tmp_path):
    """As of Code Llama 34B: no text has them, so that the network needs no embedding of them. Others it needs."""
    theirs, folder = small_llama(tmp_path / "code", vocab_size=258, more=["<fill>", "<middle>"])
    child, _ = extend(folder, "train_len=16", "eval.lengths=[1,2]")
    assert weights(child)["embedding.weight"].shape == theirs.model.embed_tokens.weight.shape

    _, folder = small_llama(tmp_path / "small", vocab_size=257)
    error = refused(folder, f"data.cache_dir={tmp_path / 'none'}")
    assert "has a vocabulary of 257 tokens, the data another one of 258" in error
    assert not (tmp_path / "none").exists()
