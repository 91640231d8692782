"""Beginning with the weights of another run: what is inherited, kept, refused."""

import base64
import json
import shutil

import pytest
import tokenizers
import torch
import yaml
from conftest import outcome_of, rows_of
from hf_models import SIZES, hf_model
from safetensors.torch import load_file

import ropewalk
import train as program
from data.hf_tokenizer import BYTE_OF
from evaluation.results import load_all
from model import serialization
from scripts import evaluate as script


def config(train, name: str) -> dict:
    return yaml.safe_load((train.runs / name / "config.yaml").read_text())


def weights(train, name: str) -> dict[str, torch.Tensor]:
    return load_file(train.runs / name / "model.safetensors")


def from_run(train, name: str) -> str:
    return f"init_from={train.runs / name}"


def test_two_extensions_keep_the_first_length(train, straight):
    base, longer = straight("pe=rope", "pe.base=500", "model.n_layer=2"), ["eval.lengths=[0.5,1,2]"]
    outcome = train(f"init_from={base}", "pe=yarn", "pe.scale=2", "train_len=32", "trainer.max_steps=2", *longer)
    assert outcome.code == 0, outcome.err
    first = config(train, "run-yarn-32")
    assert "scale 2" in outcome.out.split("original length 16")[0]  # beyond original_len the scale is at work
    assert (first["pe"]["original_len"], first["pe"]["base"], first["model"]["n_layer"]) == (16, 500, 2)
    longer += ["trainer.max_steps=1"]
    outcome = train(from_run(train, "run-yarn-32"), "pe=yarn", "pe.scale=4", "train_len=64", *longer)
    assert outcome.code == 0, outcome.err
    second = config(train, "run-yarn-32-yarn-64")
    assert (second["pe"]["original_len"], second["init_from"]) == (16, str(train.runs / "run-yarn-32"))
    assert {e.variant.scale for e in load_all(train.runs / "run-yarn-32-yarn-64")} == {4.0}


def test_positions_can_be_dropped(train, straight):
    """DroPE: NoPE goes on with RoPE's weights, and says so; it reads no encoding's weights zero-shot."""
    outcome = train(f"init_from={straight('pe=rope')}", "experiment=drope", "trainer.max_steps=1", "name=dropped")
    assert outcome.code == 0, outcome.err
    assert "DroPE: weights trained with rope go on without positions" in outcome.out
    assert config(train, "dropped")["pe"]["name"] == "nope"


def test_it_begins_where_the_base_model_ended(train, straight):
    """Without a change and at a learning rate of nearly 0 it stays what it was."""
    base = straight("pe=cope", "pe.npos_max=20")
    train(f"init_from={base}", "name=child", "optim.lr=1e-12", "trainer.max_steps=1")
    assert config(train, "child")["pe"]["npos_max"] == 20  # inherited with the encoding
    torch.testing.assert_close(weights(train, "child"), load_file(base / "model.safetensors"), rtol=0, atol=1e-9)
    losses = [rows_of(run)[-1]["val/loss"] for run in (base, train.runs / "child")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_learned_table_is_extended(train):
    """The child has the base's vectors, which test_absolute.py interpolates."""
    train("pe=learned", "name=base")
    longer = [from_run(train, "base"), "train_len=64", "eval.lengths=[0.25,1]", "trainer.max_steps=1", "optim.lr=1e-12"]
    outcome = train(*longer, "pe=learned", "pe.scale=4", "name=longer")
    assert outcome.code == 0, outcome.err
    tables = (weights(train, name)["blocks.0.position.table"] for name in ("base", "longer"))
    torch.testing.assert_close(*tables, rtol=0, atol=1e-9)
    child = serialization.load(train.runs / "longer").encodings[0]
    assert (child.max_len, child.scales) == (64, (4.0,))
    short = train(*longer, "pe=learned", "pe.scale=2", "name=short")
    assert (short.code, "pe.scale" in short.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pe=cope"], "pe=cope (CoPE) cannot read weights trained with rope (rotary, half layout, 16 channels)"),
        (["pe=rope", "pe.layout=interleaved"], "interleaved layout"),
        (["model.dim=64"], "model.dim=64 contradicts"),
        (["model=tiny"], "contradicts"),  # the program's default, but asked for
        (["data.tokenizer=VOCABULARY"], "is not what it was trained on (tokenizer)"),
    ],
)
def test_what_does_not_fit_is_refused(train, straight, arguments, message, tmp_path):
    letters = "".join(f"{base64.b64encode(bytes([i])).decode()} {255 - i}\n" for i in range(256))
    (tmp_path / "v.tiktoken").write_text(letters)
    arguments = [a.replace("VOCABULARY", str(tmp_path / "v.tiktoken")) for a in arguments]
    outcome = train(f"init_from={straight('pe=rope')}", *arguments, "name=child")
    assert outcome.code == 2
    assert message in outcome.err
    assert not (train.runs / "child").exists()


def test_choices_of_the_user_s_own_files_count(train, straight, monkeypatch, tmp_path):
    """Of an experiment outside of conf/, by way of the lists of defaults, and of a group of theirs."""
    base = straight("pe=rope", "pe.base=500", "model.n_layer=2")
    own = {
        "experiment/sharp.yaml": "# @package _global_\npe: {attention_factor: 1.5}\n",
        "experiment/long.yaml": "# @package _global_\ndefaults: [sharp, _self_, override /pe: yarn]\n"
        "pe: {base: 10000.0, scale: 2.0}\n",
        "experiment/wide.yaml": "# @package _global_\nmodel: {dim: 64}\n",
        "pe/mine.yaml": "defaults: [yarn, _self_]\nname: mine\nscale: 2.0\n",
    }
    for name, text in own.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    configured = []
    monkeypatch.setattr(program, "train", configured.append)

    def pe_of(*options):
        outcome = train(f"init_from={base}", "train_len=32", "eval.lengths=[0.5,1]", "overwrite=true", *options)
        assert outcome.code == 0, outcome.err
        pe = configured[-1].pe
        return pe["name"], pe["base"], pe["scale"], pe["original_len"], pe["attention_factor"]

    for place in (f"--config-dir={tmp_path}/mine", f"hydra.searchpath=[file://{tmp_path}/mine]"):
        # chosen values win, though that of the base is yarn.yaml's own
        assert pe_of(place, "experiment=long") == ("yarn", 10_000.0, 2.0, 16, 1.5)
        assert pe_of(place, "experiment=long", "pe.base=700") == ("yarn", 700.0, 2.0, 16, 1.5)
        assert pe_of(place, "pe=mine") == ("mine", 500.0, 2.0, 16, None)
    outcome = train(place, f"init_from={base}", "experiment=wide")
    assert (outcome.code, "model.dim=64 contradicts" in outcome.err) == (2, True)


def test_a_pattern_is_extended_part_by_part(train):
    hybrid = ["pe=hybrid", "pe.local.pe=rope", "pe.local.window=4", "pe.global.pe=rope"]
    assert train(*hybrid, "+pe.global.base=500.0", "model.n_layer=4", "name=base").code == 0
    longer = [from_run(train, "base"), "train_len=32", "eval.lengths=[0.5,1]", "trainer.max_steps=1", "name=child"]
    outcome = train(*longer, "pe=hybrid", "pe.global.pe=yarn", "+pe.global.scale=2.0")
    assert outcome.code == 0, outcome.err
    pe = config(train, "child")["pe"]
    assert pe["local"] == config(train, "base")["pe"]["local"]  # its window too, though hybrid.yaml has another
    assert (pe["global"]["base"], pe["global"]["scale"], pe["global"]["original_len"]) == (500.0, 2.0, 16)


def test_partial_names_what_is_fresh(train, straight):
    partial = [f"init_from={straight('pe=rope')}", "init_partial=true", "optim.lr=1e-12", "trainer.max_steps=1"]
    outcome = train(*partial, "pe=cope", "model.n_layer=2", "name=deeper")
    assert outcome.code == 0, outcome.err
    assert "initialised at random: blocks.0.position.table, blocks.1.attn.out.weight, " in outcome.out
    before, after = load_file(straight("pe=rope") / "model.safetensors"), weights(train, "deeper")
    assert all(torch.allclose(after[name], value, rtol=0, atol=1e-9) for name, value in before.items())
    outcome = train(*partial, "model.dim=64", "name=wider")
    assert (outcome.code, "none of the weights" in outcome.err) == (2, True)
    assert not (train.runs / "wider").exists()


def test_the_optimizer_goes_on(train, monkeypatch):
    """Where AdamW's averages hardly change in a step, they are those of the first run, and it counts its steps."""
    train("pe=cope", "name=base")
    options = [from_run(train, "base"), "init_optimizer=true", "trainer.max_steps=2", "optim.lr=1e-12", "name=child"]
    assert train(*options, "optim.beta1=0.999999999", "optim.beta2=0.999999999").code == 0
    before, after = (
        torch.load(train.runs / run / "checkpoints" / f"step={n}.ckpt") for run, n in (("base", 6), ("child", 2))
    )
    for name, value in before["optimizer"].items():
        if name.endswith("/step"):
            assert (value, after["optimizer"][name]) == (6, 8)
        else:
            torch.testing.assert_close(after["optimizer"][name], value, rtol=1e-5, atol=1e-9)
    shutil.rmtree(train.runs / "base" / "checkpoints")
    outcome = train(*options[:-1], "name=none")
    assert (outcome.code, "base has none" in outcome.err) == (2, True)
    assert not (train.runs / "none").exists()


def write_tokenizer(folder):
    """A tokenizer.json whose tokens are the bytes and two special ones, of which the second ends a text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(dict(BYTE_OF), []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')


def small_llama(folder, vocab_size=300):
    """A Llama of transformers with random weights, and where it lies, with a tokenizer."""
    rope = {"rope_type": "default", "rope_theta": 700.0}
    sizes = SIZES | dict(vocab_size=vocab_size, max_position_embeddings=16, rope_parameters=rope)
    model = hf_model("llama", **sizes)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model, f"hf:{folder}"


def test_a_run_carries_the_vocabulary_trained_for_it(train, tmp_path):
    """So it is read, and extended, when the corpus, and what was prepared of it, are gone."""
    assert train("data.tokenizer=train:268", "name=base").code == 0
    before = ropewalk.load(train.runs / "base").encode("knots in a rope")
    assert len(before) < 10
    other = tmp_path / "other"
    other.mkdir()
    for i, path in enumerate(sorted(train.corpus.iterdir())):
        path.rename(other / path.name).write_text(f"{i} walks on a rope; " * 40)
    for path in tmp_path.glob("cache/*/*"):
        path.unlink()
    longer = [from_run(train, "base"), f"data.files={other}/*.txt", "trainer.max_steps=1", "name=child"]
    outcome = train(*longer)
    assert outcome.code == 0, outcome.err
    for name in ("base", "child"):
        assert ropewalk.load(train.runs / name).encode("knots in a rope").tolist() == before.tolist()
    assert config(train, "child")["data"]["tokenizer"] == f"{train.runs}/base/tokenizer/bpe-268.tiktoken"


def test_a_model_of_transformers_is_read_as_it_is(train, capfd, monkeypatch, tmp_path):
    """Without a training: it becomes a run of no steps, once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.text.stdlib_files", lambda: [(p.name, p) for p in train.corpus.iterdir()])
    theirs, folder = small_llama(tmp_path / "llama")
    settings = ["eval.sequences=2", "eval.lengths=[1,2]", "eval.variants=[ntk]", "device=cpu", f"cache_dir={tmp_path}"]
    for measure in ("lengths", "far_copies"):
        monkeypatch.setattr("sys.argv", ["evaluate.py", f"run={folder}", f"measures=[{measure}]", *settings])
        outcome = outcome_of(script.main, capfd)
        assert outcome.code == 0, outcome.err
    found = load_all(tmp_path / "runs" / "llama-rope-16")
    expected = {("lengths", "rope", 0), ("far_copies", "ntk at scale 2", 0)}
    assert {(e.kind, e.variant.label, e.step) for e in found} >= expected
    assert set(ropewalk.runs("runs")["run"]) == {"llama-rope-16"}
    model = ropewalk.load(folder, cache_dir=str(tmp_path))
    with torch.no_grad():
        expected = theirs(torch.tensor([[*b"a rope walk"]])).logits[0]
    torch.testing.assert_close(model.logits("a rope walk"), expected, rtol=1e-4, atol=1e-5)


def test_beginning_with_a_model_of_transformers(train, tmp_path):
    """A Llama trained elsewhere, with its own base, is read at its length as transformers reads it, and extended."""
    theirs, folder = small_llama(tmp_path / "llama")
    source = f"init_from={folder}"
    outcome = train(source, "pe=yarn", "pe.scale=2", "train_len=32", "trainer.max_steps=1", "optim.lr=1e-12", "name=a")
    assert outcome.code == 0, outcome.err
    assert "experiment=extend, for a trained model, beneath what is given: learning rate 1e-12, 2 steps" in outcome.out
    record = config(train, "a")
    assert (record["optim"]["lr"], record["trainer"]["val_every"], record["trainer"]["batch_size"]) == (1e-12, 3, 4)
    assert (record["pe"]["base"], record["pe"]["original_len"]) == (700.0, 16)
    assert record["model"]["n_layer"] == 2
    ours = weights(train, "a")["embedding.weight"]
    torch.testing.assert_close(ours, theirs.model.embed_tokens.weight.detach(), rtol=0, atol=1e-9)
    train(from_run(train, "a"), "train_len=32", "eval.lengths=[1,2]", "trainer.max_steps=1", "name=grandchild")
    assert json.loads((train.runs / "a" / "model.json").read_text())["vocab_size"] == 300  # of which 258 are used
    assert train(source, "train_len=8", "trainer.max_steps=0", "eval.lengths=[1,2]", "name=short").code == 0
    assert config(train, "short")["optim"]["lr"] == 3e-4  # not the one of a training from scratch
    (short,) = [e.variant for e in load_all(train.runs / "short") if e.variant.zero_shot]  # yarn, which the run reads
    assert (short.pe["original_len"], serialization.describe(train.runs / "short")["original_len"]) == (16, 16)
    (tmp_path / "llama" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    for name in ("a", "grandchild"):
        assert ropewalk.load(train.runs / name, cache_dir=str(tmp_path)).encode("a rope").tolist() == [*b"a rope"]
    wrong = train(source, "name=b", "pe=cope")
    assert "cannot read weights trained with" in wrong.err
    _, small = small_llama(tmp_path / "small", vocab_size=257)
    wrong = train(f"init_from={small}", "name=b", f"data.cache_dir={tmp_path / 'none'}")
    assert (wrong.code, (train.runs / "b").exists(), (tmp_path / "none").exists()) == (2, False, False)
    assert "has a vocabulary of 257 tokens, the data one of 258" in wrong.err
    assert train(f"init_from=hf:{tmp_path / 'none'}", "name=b").code == 2
