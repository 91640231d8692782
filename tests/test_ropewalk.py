"""The Python interface, on a run as a user has it."""

import math
import os
import shutil
import subprocess
import sys
from itertools import permutations, zip_longest
from pathlib import Path

import pytest
import torch
from conftest import ENCODINGS, ROOT
from hypothesis import assume, given, settings, strategies

import ropewalk
from ropewalk.evaluation.results import load_all


@pytest.fixture
def run(straight) -> Path:
    return straight("pe=rope", "eval.by_position=false", "eval.far_copies=false")


def test_a_trained_model(run):
    model = ropewalk.load(run)
    ids = model.encode("knots")
    assert model.data.decode(ids.tolist()) == "knots"
    logits = model.logits("knots")
    assert logits.shape == (5, 257)
    assert torch.equal(logits, model.net(ids[None])[0, :, :257])
    assert torch.equal(ropewalk.load(str(run)).logits("knots"), logits)
    text = model.generate("knots", 30, seed=1)
    assert model.generate("knots", 30, seed=1) == text
    assert model.generate("knots", 30, seed=2) != text


def test_read_by_another_encoding(run):
    rope = ropewalk.load(run)
    yarn = ropewalk.load(run, pe="yarn", scale=8.0)
    long = "knots in a rope; " * 4
    short = long[:16]  # the training length
    assert torch.equal(rope.logits(short), yarn.logits(short))
    assert not torch.allclose(rope.logits(long), yarn.logits(long), atol=1e-3)
    with pytest.raises(ValueError, match=r"scales.*scale"):
        ropewalk.load(run, pe="yarn", scales=8.0)
    with pytest.raises(ValueError, match="cannot read weights trained with rope"):
        ropewalk.load(run, pe="alibi")


def test_runs(run, tmp_path):
    table = ropewalk.runs(run)
    over_all = table[table.seed.isna()]
    frame = table[table.seed == 0]
    assert len(frame) == len(over_all) == len(table) / 2 == sum(len(e.measured) for e in load_all(run))
    assert not frame.duplicated(["run", "variant", "measure", "task", "length", "quantity"]).any()
    assert over_all.value.tolist() == frame.value.tolist()  # of one seed
    own = frame[~frame.zero_shot].set_index("length")
    assert list(own.index) == [8, 16, 32, 64, 128]
    assert set(frame[frame.zero_shot].encoding) == {"yarn"}  # what RoPE is read by unless told otherwise
    (as_trained,) = [e for e in load_all(run) if not e.variant.zero_shot]
    (m,) = [m for m in as_trained.measured if m.length == 64]
    assert own.value[64] == pytest.approx(sum(m.nats) / math.log(2) / sum(m.bytes))
    assert own.low[64] < own.value[64] < own.high[64]
    assert list(ropewalk.runs(tmp_path)) == list(table)  # of no runs
    assert len(ropewalk.runs(run, exclude=["ru*"])) == 0
    assert (frame.tokens_per_s > 0).all()
    curve = ropewalk.curves(run, only=["ru*"])
    assert curve["val/bits_per_byte"].notna().any()
    assert list(curve.tokens) == sorted(curve.tokens)


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name != "hybrid"])
def test_an_encoding_for_a_network_of_ones_own(name):
    pe = ropewalk.encoding(name, n_head=4, n_kv_head=2, head_dim=16, train_len=32)
    torch.manual_seed(0)
    q = torch.randn(2, 4, 24, 16)
    k, v = torch.randn(2, 2, 2, 24, 16)
    x = torch.randn(2, 24, 64)
    out = ropewalk.attend(pe, q, k, v, x, embedded=True)
    assert out.shape == (2, 4, 24, 16)
    # Other tokens from the 16th on change their own outputs and no earlier one.
    sign = torch.ones(24, 1)
    sign[15:] = -1
    other = ropewalk.attend(pe, sign * q, sign * k, sign * v, sign * x, embedded=True)
    torch.testing.assert_close(out[:, :, :15], other[:, :, :15])
    assert (out - other)[:, :, 15:].abs().amax(-1).min() > 1e-3


SHAPES = {"q": (2, 4, 24, 16), "k": (2, 2, 24, 16), "v": (2, 2, 24, 16), "x": (2, 24, 64)}


@given(data=strategies.data(), name=strategies.sampled_from(["rope", "alibi", "cope", "t5", "window"]))
@settings(max_examples=60)
def test_tensors_of_another_shape_are_refused(data, name):
    """Layouts of other libraries, one query with a cache, other heads or widths: none may give a number."""
    changed = data.draw(strategies.sampled_from([*SHAPES]))
    other = data.draw(strategies.sampled_from([*permutations(SHAPES[changed])]))
    for axis in range(len(other)):
        size = data.draw(strategies.sampled_from([other[axis], 1, other[axis] + 1]))
        other = (*other[:axis], size, *other[axis + 1 :])
    assume(other[: 2 if changed == "x" else 4] != SHAPES[changed][: 2 if changed == "x" else 4])
    tensors = {key: torch.zeros(other if key == changed else shape) for key, shape in SHAPES.items()}
    pe = ropewalk.encoding(name, n_head=4, n_kv_head=2, head_dim=16, train_len=32)
    with pytest.raises(ValueError, match=r"\["):
        ropewalk.attend(pe, **tensors)


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_an_absolute_encoding_is_not_left_out_in_silence(name):
    pe = ropewalk.encoding(name, n_head=4, head_dim=16, train_len=32)
    with pytest.raises(ValueError, match="embed"):
        ropewalk.attend(pe, *torch.zeros(3, 1, 4, 8, 16))


@pytest.mark.parametrize(
    "sizes",
    [{"n_head": 0}, {"n_kv_head": 3}, {"dim": 0}, {"head_dim": 8.0}, {"train_len": 0}, {"train_len": 16.5},
     {"train_len": 2**40}, {"n_head": "4"}],
)  # fmt: skip
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match=next(iter(sizes))):
        ropewalk.encoding("rope", **{"n_head": 4, "head_dim": 16, "train_len": 32} | sizes)


def test_what_one_encoding_cannot_be():
    shape = {"n_head": 4, "head_dim": 16, "train_len": 32}
    assert {"yarn", "cope", "hybrid"} <= {*ropewalk.encodings()}
    with pytest.raises(ValueError, match="yarn"):
        ropewalk.encoding("yarm", **shape, scale=1.0)
    with pytest.raises(ValueError, match="scale"):
        ropewalk.encoding("yarn", **shape, scal=1.0)
    with pytest.raises(ValueError, match=r"rope.*nope"):
        ropewalk.encoding("hybrid", **shape)
    pe = ropewalk.encoding("cope", gates="projection", **shape)
    with pytest.raises(ValueError, match="pass it as x"):
        ropewalk.attend(pe, *torch.zeros(3, 1, 4, 8, 16))


def test_two_streams_do_not_change_each_other(run):
    """Nor the network: at scale 4 and at scale 1, interleaved, each writes what it writes alone."""
    model = ropewalk.load(run, pe="yarn", scale=4.0)
    options = {"temperature": 0}
    lengths = (60, 6)  # the first beyond the training length of 16, with its prompt
    alone = [list(model.stream("knots", n, **options)) for n in lengths]
    logits = model.logits("knots")
    streams = [model.stream("knots", n, **options) for n in lengths]
    pieces = [[], []]
    for long, short in zip_longest(*streams, fillvalue=""):
        pieces[0].append(long)
        pieces[1].append(short)
        assert torch.equal(model.logits("knots"), logits)
    assert ["".join(text) for text in pieces] == ["".join(text) for text in alone]


USE = """
import ropewalk
pe = ropewalk.encoding("yarn", n_head=2, head_dim=16, train_len=64)
model = ropewalk.load({run!r}, pe="yarn", scale=2.0)
"""
PROGRAM = """
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(config_path="cfg", config_name="mine", version_base=None)
def main(cfg):
    before = HydraConfig.get()
    {use}
    assert HydraConfig.get() == before and hydra.compose("mine").pe == "theirs"
    print("done", cfg.seed)

main()
"""
NOTEBOOK = """
import hydra
hydra.initialize(config_path="cfg", version_base=None)
{use}
assert hydra.compose("mine").pe == "theirs"
print("done")
"""


@pytest.mark.parametrize("arguments", [["seed=1"], ["-m", "seed=1,2"], None])
def test_within_a_hydra_program_of_the_user_s(run, tmp_path, arguments):
    """One with a group pe of its own; None: a notebook that has initialised Hydra."""
    (tmp_path / "cfg").mkdir()
    (tmp_path / "cfg" / "mine.yaml").write_text("pe: theirs\nseed: 0\n")
    use = USE.format(run=str(run))
    text = NOTEBOOK.format(use=use) if arguments is None else PROGRAM.format(use=use.replace("\n", "\n    "))
    (tmp_path / "mine.py").write_text(text)
    command = [sys.executable, "mine.py", *(arguments or [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == (2 if arguments and arguments[0] == "-m" else 1)


def test_a_checkpoint_is_looked_at(train):
    """Of a run that was stopped: the newest, or the one that is asked for."""
    options = ["pe=rope", "trainer.keep_checkpoints=9", "eval.variants=[]", "eval.lengths=[1]", "name=whole"]
    assert train(*options).code == 0
    whole = train.runs / "whole"
    stopped = shutil.copytree(whole, train.runs / "stopped")
    for name in ("model.json", "model.safetensors", "training.json", "checkpoints/step=6.ckpt"):
        (stopped / name).unlink()
    saved = torch.load(whole / "checkpoints" / "step=4.ckpt")["model"]["embedding.weight"]
    for model in (ropewalk.load(stopped), ropewalk.load(whole, step=4), ropewalk.load(f"{whole}@4")):
        assert torch.equal(model.net.embedding.weight, saved)
    assert not torch.equal(ropewalk.load(whole).net.embedding.weight, saved)
    with pytest.raises(ValueError, match=r"\[2, 4, 6\]"):
        ropewalk.load(whole, step=3)
    outcome = train(f"init_from={whole}@2", "trainer.max_steps=0", "eval.lengths=[1]", "eval.variants=[]", "name=from")
    assert outcome.code == 0, outcome.err


def test_an_installed_copy_finds_its_files(tmp_path):
    """One that is not editable has what the wheel holds, and nothing else."""
    pytest.importorskip("setuptools", "77")
    kept_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "corpus", "*.egg-info", "build", "docs", "tests")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=kept_out)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(wheels)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    installed = tmp_path / "installed"
    shutil.unpack_archive(next(wheels.iterdir()), installed, "zip")
    files = {path.relative_to(source) for path in (source / "conf").rglob("*.yaml")}
    files |= {path.relative_to(source) for path in (source / "ropewalk").rglob("page.*")}
    assert files
    assert not [str(file) for file in files if not (installed / file).is_file()]

    shutil.rmtree(source)
    use = "import ropewalk; ropewalk.encoding('yarn', n_head=2, head_dim=8, train_len=64); print(ropewalk.__file__)"
    beginnings = {("-c", use): f"{installed}/ropewalk", ("-m", "train", "--help"): "Train a small GPT"}
    for arguments, beginning in beginnings.items():
        done = subprocess.run([sys.executable, *arguments], cwd=installed, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(beginning)


@pytest.mark.parametrize("name", ["model", "data"])
def test_a_module_of_the_user_s_that_hides_ours_is_named(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("mine = 1\n")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import ropewalk; ropewalk.load"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert f"ImportError: Ropewalk's package {name!r} is hidden by" in done.stderr
    assert str(tmp_path) in done.stderr
