"""Beginning with the weights of another run: what is inherited, kept, refused."""

import base64
import shutil

import pytest
import torch
import yaml
from conftest import rows_of
from safetensors.torch import load_file

from conf import cli
from evaluation.results import Results
from model import store


def config(train, name: str) -> dict:
    return yaml.safe_load((train.runs / name / "config.yaml").read_text())


def weights(train, name: str) -> dict[str, torch.Tensor]:
    return load_file(train.runs / name / "model.safetensors")


def from_run(train, name: str) -> str:
    return f"init_from={train.runs / name}"


def test_two_extensions_keep_the_first_length(train):
    train("pe=rope", "pe.base=500", "model.n_layer=2", "name=base")
    longer = ["eval.lengths=[0.5,1,2]", "trainer.max_steps=2"]
    outcome = train(from_run(train, "base"), "pe=yarn", "pe.scale=2", "train_len=32", *longer)
    assert outcome.code == 0, outcome.err
    first = config(train, "base-yarn-32")
    assert first["pe"]["original_len"] == 16
    assert "scale 2" in outcome.out.split("original length 16")[0]  # beyond original_len the scale is at work
    assert first["pe"]["base"] == 500
    assert first["model"]["n_layer"] == 2
    outcome = train(from_run(train, "base-yarn-32"), "pe=yarn", "pe.scale=4", "train_len=64", *longer)
    assert outcome.code == 0, outcome.err
    second = config(train, "base-yarn-32-yarn-64")
    assert second["pe"]["original_len"] == 16
    assert {row.reading for row in Results.load(train.runs / "base-yarn-32-yarn-64" / "results.json").lengths} == {
        "scale 4, as trained"
    }
    assert second["init_from"] == str(train.runs / "base-yarn-32")


def test_it_begins_where_the_parent_ended(train):
    """Without a change and at a learning rate of nearly 0, the first loss is the parent's on that batch."""
    train("pe=cope", "pe.npos_max=20", "name=base", "trainer.max_steps=30")
    train(from_run(train, "base"), "name=child", "optim.lr=1e-12", "trainer.max_steps=1")
    assert config(train, "child")["pe"]["npos_max"] == 20  # inherited with the encoding
    before, after = weights(train, "base"), weights(train, "child")
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-9)
    assert rows_of(train.runs / "child")[0]["train/loss"] < rows_of(train.runs / "base")[0]["train/loss"] - 1
    at_1x = {run: Results.load(train.runs / run / "results.json").validation.loss for run in ("base", "child")}
    assert at_1x["base"] == pytest.approx(at_1x["child"], rel=1e-6)


def test_a_learned_table_is_interpolated(train):
    """The child begins with (m - p) P_n + (p - n) P_m at position p' = 4p between the parent's n and m = n + 1."""
    train("pe=learned", "name=base")
    longer = [from_run(train, "base"), "train_len=64", "eval.lengths=[0.25,1]", "trainer.max_steps=1", "optim.lr=1e-12"]
    outcome = train(*longer, "pe.scale=4", "name=longer")
    assert outcome.code == 0, outcome.err
    table = weights(train, "base")["positions.0.table"]
    child = store.load(train.runs / "longer").encodings[0]
    with torch.no_grad():
        found = child.embed(torch.zeros(64, 32), torch.arange(64))
    for new in range(64):
        p = new * 16 / 64
        n, m = int(p), int(p) + 1
        expected = (m - p) * table[n] + (p - n) * table[min(m, 15)]  # the last vector serves those beyond it
        torch.testing.assert_close(found[new], expected, rtol=0, atol=1e-6)
    short = train(from_run(train, "base"), "pe.scale=2", "train_len=64", "eval.lengths=[0.25,1]", "name=short")
    assert short.code == 2
    assert "pe.scale" in short.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pe=cope"], "pe=cope (CoPE) cannot read weights trained with rope (rotary, half layout, 16 channels)"),
        (["pe=alibi"], "init_partial=true"),
        (["pe=rope", "pe.layout=interleaved"], "interleaved layout"),
        (["model.dim=64"], "model.dim=64 contradicts"),
        (["pe=yarn", "+pe.beta_fsat=4"], "did you mean pe.beta_fast?"),
        (["pe=yarn", "pe.scale=eight"], "pe.scale='eight'"),
        (["train_len=long"], "train_len='long'"),
        (["~pe"], "choose it by its group, as in pe=NAME"),
        (["model=llama_tiny", "model.n_layer=1"], "contradicts"),
        (["data.tokenizer=VOCABULARY"], "is not what it was trained on (tokenizer)"),
    ],
)
def test_what_does_not_fit_is_refused(train, arguments, message, tmp_path):
    letters = "".join(f"{base64.b64encode(bytes([i])).decode()} {255 - i}\n" for i in range(256))
    (tmp_path / "v.tiktoken").write_text(letters)
    arguments = [a.replace("VOCABULARY", str(tmp_path / "v.tiktoken")) for a in arguments]
    train("pe=rope", "name=base")
    outcome = train(from_run(train, "base"), *arguments, "name=child")
    assert outcome.code == 2
    assert message in outcome.err
    assert not (train.runs / "child").exists()


def test_no_parent(train):
    outcome = train("init_from=runs/none", "pe=yarn", "name=child")
    assert outcome.code == 2
    assert "init_from=runs/none: there is no such directory" in outcome.err
    assert not train.runs.exists()


def interrupt(train, name: str) -> None:
    """Leave what an interruption after step 4 leaves."""
    for left in ("results.json", "model.safetensors", "model.json", "checkpoints/step=6.ckpt"):
        (train.runs / name / left).unlink()


@pytest.mark.parametrize("command", [["name=child"], ["pe=yarn", "pe.scale=2"]])
def test_a_run_that_has_begun_needs_no_parent(train, command):
    train("pe=rope", "pe.base=500", "model.n_layer=2", "name=base")
    command = [from_run(train, "base"), "train_len=32", "eval.lengths=[0.5,1]", "optim.lr=0.01", *command]
    assert train(*command).code == 0
    child = next(path.name for path in train.runs.iterdir() if path.is_dir() and path.name != "base")
    straight, record = weights(train, child), config(train, child)
    interrupt(train, child)
    shutil.rmtree(train.runs / "base")
    outcome = train(*command)
    assert outcome.code == 0, outcome.err
    assert "after step 4" in outcome.out
    assert config(train, child) == record
    assert all(torch.equal(value, straight[name]) for name, value in weights(train, child).items())
    other = train(*command, "optim.lr=0.02")
    assert "optim.lr: 0.01 there, 0.02 now" in other.err

    interrupt(train, child)
    for path in (train.runs / child / "checkpoints").iterdir():
        path.unlink()
    for again in (command, [*command, "overwrite=true"]):
        outcome = train(*again)
        assert outcome.code == 2
        assert f"{train.runs / 'base'}" in outcome.err


def test_what_an_experiment_sets_counts_as_given(train, tmp_path, monkeypatch):
    """Else the parent's would take its place without a word."""
    train("pe=rope", "pe.base=500", "name=base")
    conf_dir = tmp_path / "conf"
    shutil.copytree(cli.CONF_DIR, conf_dir, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(cli, "CONF_DIR", conf_dir)
    head = "# @package _global_\n"
    (conf_dir / "experiment" / "sharp.yaml").write_text(head + "pe: {attention_factor: 1.5}\n")
    (conf_dir / "experiment" / "long.yaml").write_text(
        head + "defaults: [sharp, _self_, override /pe: yarn]\npe: {base: 10000.0, scale: 2.0}\n"
    )
    (conf_dir / "experiment" / "wide.yaml").write_text(head + "model: {dim: 64}\n")
    small = ["trainer.max_steps=1", "eval.lengths=[0.5,1]"]
    outcome = train(from_run(train, "base"), "experiment=long", *small, "train_len=32", "name=child")
    assert outcome.code == 0, outcome.err
    pe = config(train, "child")["pe"]
    assert (pe["name"], pe["base"], pe["scale"], pe["original_len"]) == ("yarn", 10_000.0, 2.0, 16)
    assert pe["attention_factor"] == 1.5
    outcome = train(from_run(train, "base"), "experiment=long", *small, "train_len=32", "pe.base=700", "name=mine")
    assert config(train, "mine")["pe"]["base"] == 700.0
    outcome = train(from_run(train, "base"), "experiment=wide", *small, "name=wide")
    assert outcome.code == 2
    assert "model.dim=64 contradicts" in outcome.err


def test_partial_names_what_is_fresh(train):
    train("pe=rope", "name=base")
    outcome = train(from_run(train, "base"), "pe=cope", "init_partial=true", "name=child")
    assert outcome.code == 0, outcome.err
    assert "left fresh: positions.0.table" in outcome.out
    deeper = ["model.n_layer=2", "init_partial=true", "optim.lr=1e-12", "trainer.max_steps=1"]
    outcome = train(from_run(train, "base"), *deeper, "name=deeper")
    assert "left fresh: blocks.1.attn.out.weight, blocks.1.attn.qkv.weight" in outcome.out
    before, after = weights(train, "base"), weights(train, "deeper")
    assert all(torch.allclose(after[name], value, rtol=0, atol=1e-9) for name, value in before.items())
    outcome = train(from_run(train, "base"), "model.dim=64", "init_partial=true", "name=wider")
    assert (outcome.code, "none of the weights" in outcome.err) == (2, True)
    assert not (train.runs / "wider").exists()


def test_beginning_with_a_model_of_transformers(train, tmp_path):
    """A Llama trained elsewhere, with its own base, is read at its length as transformers reads it, and extended."""
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(shape).eval()
    theirs.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    source = f"init_from=hf:{tmp_path / 'llama'}"
    outcome = train(source, "pe=yarn", "pe.scale=2", "train_len=32", "trainer.max_steps=1", "optim.lr=1e-12", "name=a")
    assert outcome.code == 0, outcome.err
    record = config(train, "a")
    assert (record["pe"]["base"], record["pe"]["original_len"]) == (700.0, 16)
    assert record["model"]["n_layer"] == 2
    ours = weights(train, "a")["embedding.weight"]
    torch.testing.assert_close(ours, theirs.model.embed_tokens.weight.detach(), rtol=0, atol=1e-9)
    train(from_run(train, "a"), "train_len=32", "eval.lengths=[1,2]", "trainer.max_steps=1", "name=grandchild")
    for name in ("a", "grandchild"):
        assert (train.runs / name / "tokenizer" / "tokenizer.json").read_text() == "{}"
    wrong = train(source, "name=b", "pe=cope")
    assert "cannot read weights trained with" in wrong.err
    small = transformers.LlamaConfig(**(shape.to_dict() | {"vocab_size": 99}))
    transformers.LlamaForCausalLM(small).save_pretrained(tmp_path / "small")
    wrong = train(f"init_from=hf:{tmp_path / 'small'}", "name=b")
    assert (wrong.code, (train.runs / "b").exists()) == (2, False)
    assert "has a vocabulary of 99 tokens, the data one of 257" in wrong.err
    wrong = train(f"init_from=hf:{tmp_path / 'none'}", "name=b")
    assert wrong.code == 2
    assert "none" in wrong.err
