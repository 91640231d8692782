"""Beginning with the weights of another run: what is inherited, kept, refused."""

import base64
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import ROOT, rows_of
from safetensors.torch import load_file

from evaluation.results import Results


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
    train("pe=learned", "name=base")
    outcome = train(from_run(train, "base"), "pe.scale=4", "train_len=64", "eval.lengths=[0.25,1]", "name=longer")
    assert outcome.code == 0, outcome.err
    name = next(name for name in weights(train, "base") if name.startswith("positions."))
    assert weights(train, "longer")[name].shape == weights(train, "base")[name].shape
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
    outcome = train("init_from=runs/none")
    assert outcome.code == 2
    assert "runs/none" in outcome.err


def test_partial_names_what_is_fresh(train):
    train("pe=rope", "name=base")
    outcome = train(from_run(train, "base"), "pe=cope", "init_partial=true", "name=child")
    assert outcome.code == 0, outcome.err
    assert "left fresh: positions.0.table" in outcome.out


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


def evaluate(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/evaluate.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_swapping_without_training(train):
    train("pe=rope", "pe.base=700", "trainer.max_steps=40", "eval.lengths=[1,4]")
    run = train.runs / "rope-text"
    before = (run / "results.json").read_bytes()
    done = evaluate(f"run={run}", "pe=rope,linear,yarn,dynamic_ntk,nope", "eval.lengths=[1,4]")
    assert done.returncode == 2  # nope is of another family
    assert "pe=nope (no encoding) cannot read weights trained with rope" in done.stderr
    done = evaluate(f"run={run}", "pe=rope,linear,yarn,dynamic_ntk", "pe.beta_fast=4.0", "eval.lengths=[1,4]")
    assert done.returncode == 0, done.stderr
    assert (run / "results.json").read_bytes() == before
    assert (run / "figures" / "swap.png").exists()
    swapped = Results.load(run / "swap.json")
    losses = {(row.reading, row.length): row.loss for row in swapped.lengths}
    labels = ["rope, as trained", "linear, scale 4", "yarn, scale 4", "dynamic_ntk, scale 1"]
    assert list(dict.fromkeys(label for label, _ in losses)) == labels
    own = {row.length: row.loss for row in Results.load(run / "results.json").lengths}
    assert losses["rope, as trained", 64] == own[64]
    assert losses["dynamic_ntk, scale 1", 16] == own[16]  # up to original_len it is RoPE
    assert len({losses[label, 64] for label in labels}) == 4

    unscaled = evaluate(f"run={run}", "pe=linear,yarn", "pe.scale=1", "eval.lengths=[1,4]")
    assert unscaled.returncode == 0, unscaled.stderr
    for row in Results.load(run / "swap.json").lengths:
        assert row.loss == own[row.length]  # scale 1 changes nothing, bit for bit
    for wrong, hint in (
        (["pe=yarm"], "did you mean yarn?"),
        (["pe=yarn", "pe.beta_fats=3"], "did you mean pe.beta_fast"),
    ):
        done = evaluate(f"run={run}", *wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert hint in done.stderr
