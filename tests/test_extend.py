"""Beginning with the weights of another run: what is inherited, kept, refused."""

import base64
import json
import shutil
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml
from conftest import rows_of
from hf_models import SIZES, hf_model
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


@pytest.fixture
def extend(train):
    """`extend(base, "pe=yarn", ...)` takes one step, at a rate of nearly 0: the run's folder, and what was said."""

    def run(base, *options: str, name="child") -> tuple[Path, str]:
        step = "trainer.max_steps=1", "optim.lr=1e-12"
        outcome = train(f"init_from={base}", *step, f"name={name}", *options)
        assert outcome.code == 0, outcome.err
        return train.runs / name, outcome.out

    return run


def test_two_extensions_keep_the_first_length(straight, extend):
    base = straight("pe=rope", "pe.base=500", "model.n_layer=2")
    reach = "eval.lengths=[0.5,1,2]"
    first, said = extend(base, "pe=yarn", "pe.scale=2", "train_len=32", reach, name="null")
    first = first.with_name("run-yarn-32")
    assert "scale 2" in said.split("original length 16")[0]  # beyond original_len the scale is at work
    config = read_config(first)
    assert (config["pe"]["original_len"], config["pe"]["base"], config["model"]["n_layer"]) == (16, 500, 2)
    second, _ = extend(first, "pe=yarn", "pe.scale=4", "train_len=64", reach)
    config = read_config(second)
    assert config["pe"]["original_len"] == 16
    assert config["init_from"] == str(first)
    assert {e.variant.scale for e in load_all(second) if e.step} == {4.0}


def test_a_run_measures_the_model_it_starts_from_once(straight, train, monkeypatch):
    """As that model reads, and by the run's encoding: what a run of 0 steps measures of the same weights."""
    given = f"init_from={straight('pe=rope')}", "train_len=32", "eval.lengths=[1,2]"
    yarn = *given, "pe=yarn", "pe.scale=2"
    assert train(*yarn, "eval.variants=[rope]", "trainer.max_steps=0", "name=none").code == 0
    expected = {e.variant.pe["name"]: e for e in load_all(train.runs / "none")}

    with monkeypatch.context() as patch:
        patch.setattr(program.Training, "fit", lambda *_: sys.exit("power cut"))
        assert train(*yarn, "name=child").code == "power cut"
    before = {e.variant.pe["name"]: e for e in load_all(train.runs / "child")}
    assert set(before) == {"rope", "yarn"}
    for name, e in before.items():
        assert [m.nats for m in e.measured] == [m.nats for m in expected[name].measured]
        assert [m.length for m in e.measured] == [16, 32, 64]  # the model's own training length first
        assert (e.step, e.eval) == (0, expected[name].eval)
    assert (before["rope"].train_len, before["yarn"].train_len) == (16, 16)

    # Of 0 steps the model's training length is the default, and stays the original one.
    assert train(given[0], "trainer.max_steps=0", "name=other-text").code == 0
    described = read_json(train.runs / "other-text" / "model.json")
    assert (described["train_len"], described["original_len"]) == (16, 16)

    resumed = train(*yarn, "name=child")
    assert (resumed.code, resumed.out.count("measuring lengths")) == (0, 1)  # after the last step
    assert {e.variant.pe["name"]: e for e in load_all(train.runs / "child") if not e.step} == before


HYBRID = ("pe=hybrid", "pe.pattern=[local,global]", "model.n_layer=2")


def test_positions_can_be_dropped(straight, extend):
    """DroPE: NoPE goes on with RoPE's weights, here in one part of a pattern; the windows keep their RoPE."""
    base = straight(*HYBRID, "pe.global.pe=rope")
    child, _ = extend(base, *HYBRID, "pe.local.window=4")
    parts = read_config(child)["pe"]
    assert (parts["local"]["name"], parts["global"]["name"]) == ("rope", "nope")
    torch.testing.assert_close(weights(child), weights(base), rtol=0, atol=1e-9)


def test_an_encoding_with_parameters_cannot_be_dropped_in_a_part(straight, train):
    base = straight(*HYBRID, "pe.global.pe=fox")
    outcome = train(f"init_from={base}", *HYBRID, "pe.local.window=4", "name=child")
    assert outcome.code == 2
    assert "cannot read weights trained with hybrid" in outcome.err


COPE = "pe=cope", "pe.npos_max=20"


def test_it_begins_where_the_base_model_ended(straight, extend):
    base = straight(*COPE)
    child, _ = extend(base)
    assert read_config(child)["pe"]["npos_max"] == 20  # inherited with the encoding
    torch.testing.assert_close(weights(child), weights(base), rtol=0, atol=1e-9)
    last_row = rows_of(base)[-1]
    first_row = rows_of(child)[-1]  # after one step at a rate of nearly 0
    assert first_row["val/loss"] == pytest.approx(last_row["val/loss"], rel=1e-6)


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
def test_what_does_not_fit_is_refused(train, straight, arguments, message, tmp_path):
    reversed_bytes = [f"{base64.b64encode(bytes([i])).decode()} {255 - i}\n" for i in range(256)]
    (tmp_path / "v.tiktoken").write_text("".join(reversed_bytes))
    arguments = [a.replace("VOCABULARY", str(tmp_path / "v.tiktoken")) for a in arguments]
    outcome = train(f"init_from={straight('pe=rope')}", *arguments, "name=child")
    assert outcome.code == 2
    assert message in outcome.err
    assert not (train.runs / "child").exists()


OWN_FILES = {
    "experiment/sharp.yaml": "# @package _global_\npe: {attention_factor: 1.5}\n",
    "experiment/long.yaml": "# @package _global_\ndefaults: [sharp, _self_, override /pe: yarn]\n"
    "pe: {base: 10000.0, scale: 2.0}\n",
    "experiment/wide.yaml": "# @package _global_\nmodel: {dim: 64}\n",
    "pe/mine.yaml": "defaults: [yarn, _self_]\nname: mine\nscale: 2.0\n",
}


@pytest.fixture
def own_folder(tmp_path):
    for name, text in OWN_FILES.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    return tmp_path / "mine"


def test_choices_of_the_user_s_own_files_count(train, straight, script, own_folder):
    """Of an experiment outside of conf/, by way of the lists of defaults, and of a group of theirs."""
    base = straight("pe=rope", "pe.base=500", "model.n_layer=2")

    def pe_of(place, *options):
        asked = train.complete(f"init_from={base}", "train_len=32", "eval.lengths=[0.5,1]", place, *options)
        pe = yaml.safe_load(script(program, *asked, "--cfg", "job").out)["pe"]
        return [pe[key] for key in ("name", "base", "scale", "original_len", "attention_factor")]

    for place in (f"--config-dir={own_folder}", f"hydra.searchpath=[file://{own_folder}]"):
        # chosen values win, though that of the base is yarn.yaml's own
        assert pe_of(place, "experiment=long") == ["yarn", 10_000.0, 2.0, 16, 1.5]
        assert pe_of(place, "experiment=long", "pe.base=700") == ["yarn", 700.0, 2.0, 16, 1.5]
        assert pe_of(place, "pe=mine") == ["mine", 500.0, 2.0, 16, None]
    outcome = train(place, f"init_from={base}", "experiment=wide")
    assert outcome.code == 2
    assert "model.dim=64 contradicts" in outcome.err


def test_a_pattern_is_extended_part_by_part(train, straight, script):
    """The local part keeps its window too, though hybrid.yaml has another."""
    parts = ["pe=hybrid", "pe.local.pe=rope", "pe.local.window=4", "pe.global.pe=rope", "+pe.global.base=500.0"]
    base = straight(*parts, "model.n_layer=4")
    longer = ["train_len=32", "eval.lengths=[0.5,1]", "pe=hybrid", "pe.global.pe=yarn", "+pe.global.scale=2.0"]
    shown = script(program, *train.complete(f"init_from={base}", *longer), "--cfg", "job")
    pe = yaml.safe_load(shown.out)["pe"]
    assert pe["local"] == read_config(base)["pe"]["local"]
    assert (pe["global"]["base"], pe["global"]["scale"], pe["global"]["original_len"]) == (500.0, 2.0, 16)


def test_partial_names_what_is_fresh(straight, extend):
    base = straight("pe=rope")
    child, said = extend(base, "init_partial=true", "pe=cope", "model.n_layer=2")
    assert "initialised at random: blocks.0.position.table, blocks.1.attn.out.weight, " in said
    before, after = weights(base), weights(child)
    assert all(torch.allclose(after[name], value, rtol=0, atol=1e-9) for name, value in before.items())


def test_the_optimizer_goes_on(train, straight, extend):
    """Where AdamW's averages hardly change in a step, they are those of the first run, and it counts its steps."""
    base = straight(*COPE)
    child, _ = extend(base, "init_optimizer=true", "optim.beta1=0.999999999", "optim.beta2=0.999999999")
    before = torch.load(base / "checkpoints" / "step=6.ckpt")["optimizer"]
    after = torch.load(child / "checkpoints" / "step=1.ckpt")["optimizer"]
    for name, value in before.items():
        expected = value + 1 if name.endswith("/step") else value
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-9)
    shutil.rmtree(child / "checkpoints")
    outcome = train(f"init_from={child}", "init_optimizer=true", "name=none")
    assert outcome.code == 2
    assert "child has none" in outcome.err
    assert not (train.runs / "none").exists()


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
    base, other = train.runs / "base", tmp_path / "other"
    before = ropewalk.load(base).encode("knots in a rope")
    assert len(before) < 10
    other.mkdir()
    for i, path in enumerate(sorted(train.corpus.iterdir())):
        path.rename(other / path.name).write_text(f"{i} walks on a rope; " * 40)
    for path in tmp_path.glob("cache/*/*"):
        path.unlink()
    child, _ = extend(base, f"data.files={other}/*.txt")
    for run in (base, child):
        assert ropewalk.load(run).encode("knots in a rope").tolist() == before.tolist()
    assert read_config(child)["data"]["tokenizer"] == f"{base}/tokenizer/bpe-268.tiktoken"


def test_a_model_of_transformers_is_read_as_it_is(train, script, monkeypatch, tmp_path):
    """Without a training: it becomes a run of no steps, once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.text.stdlib_files", lambda: [(p.name, p) for p in train.corpus.iterdir()])
    theirs, folder = small_llama(tmp_path / "llama")
    settings = ["eval.sequences=2", "eval.lengths=[1,2]", "eval.variants=[ntk]", "device=cpu", f"cache_dir={tmp_path}"]
    outcome = script(evaluate, f"run={folder}", "measures=[lengths]", *settings)
    assert outcome.code == 0, outcome.err
    found = load_all(tmp_path / "runs" / "llama-rope-16")
    assert {(e.variant.label, e.step) for e in found} == {("rope", 0), ("ntk at scale 2", 0)}
    model = ropewalk.load(folder, cache_dir=str(tmp_path))
    with torch.no_grad():
        expected = theirs(torch.tensor([[*b"a rope walk"]])).logits[0]
    torch.testing.assert_close(model.logits("a rope walk"), expected, rtol=1e-4, atol=1e-5)


def test_beginning_with_a_model_of_transformers(train, script, extend, tmp_path):
    """A Llama trained elsewhere, with its own base, is extended by a recipe of its own, and keeps its tokenizer."""
    theirs, folder = small_llama(tmp_path / "llama")
    child, said = extend(folder, "pe=yarn", "pe.scale=2", "train_len=32")
    assert "experiment=extend" in said
    shown = yaml.safe_load(script(program, f"init_from={folder}", "--cfg", "job").out)
    assert shown["optim"]["lr"] == 3e-4  # not the one of a training from scratch
    made = read_config(child)
    assert (made["pe"]["base"], made["pe"]["original_len"], made["model"]["n_layer"]) == (700.0, 16, 2)
    ours = weights(child)["embedding.weight"]
    torch.testing.assert_close(ours, theirs.model.embed_tokens.weight.detach(), rtol=0, atol=1e-9)
    assert json.loads((child / "model.json").read_text())["vocab_size"] == 300  # of which 258 are used
    (tmp_path / "llama" / "tokenizer.json").unlink()
    assert ropewalk.load(child, cache_dir=str(tmp_path)).encode("a rope").tolist() == [*b"a rope"]


def test_special_tokens_that_a_model_lacks_are_no_matter(train, extend, tmp_path):
    """As of Code Llama 34B: no text has them, so that the network needs no embedding of them. Others it needs."""
    theirs, folder = small_llama(tmp_path / "code", vocab_size=258, more=["<fill>", "<middle>"])
    child, _ = extend(folder, "train_len=16", "eval.lengths=[1,2]")
    assert weights(child)["embedding.weight"].shape == theirs.model.embed_tokens.weight.shape
    _, folder = small_llama(tmp_path / "small", vocab_size=257)
    outcome = train(f"init_from={folder}", "name=other", f"data.cache_dir={tmp_path / 'none'}")
    assert outcome.code == 2
    assert "has a vocabulary of 257 tokens, the data another one of 258" in outcome.err
    assert not (tmp_path / "none").exists()
