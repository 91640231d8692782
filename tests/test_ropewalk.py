"""The Python interface, on a run as a user has it."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ENCODINGS, ROOT

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
    with pytest.raises(ValueError, match=r"scales.*did you mean scale\?"):
        ropewalk.load(run, pe="yarn", scales=8.0)
    with pytest.raises(ValueError, match="cannot read weights trained with rope"):
        ropewalk.load(run, pe="alibi")


def test_runs(run, tmp_path):
    frame = ropewalk.runs(run)
    assert len(frame) == sum(len(e.measured) for e in load_all(run))
    assert not frame.duplicated(["run", "variant", "kind", "task", "length", "quantity"]).any()
    own = frame[~frame.zero_shot].set_index("length")
    assert list(own.index) == [8, 16, 32, 64, 128]
    assert set(frame[frame.zero_shot].encoding) == {"yarn"}  # what RoPE is read by unless told otherwise
    (as_trained,) = [e for e in load_all(run) if not e.variant.zero_shot]
    (m,) = [m for m in as_trained.measured if m.length == 64]
    assert own.value[64] == pytest.approx(sum(m.nats) / math.log(2) / sum(m.bytes))
    assert own.low[64] < own.value[64] < own.high[64]
    assert list(ropewalk.runs(tmp_path)) == list(frame)  # of no runs
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
    out = ropewalk.attend(pe, q, k, v, x)
    assert out.shape == (2, 4, 24, 16)
    # Other tokens from the 16th on change their own outputs and no earlier one.
    sign = torch.ones(24, 1)
    sign[15:] = -1
    other = ropewalk.attend(pe, sign * q, sign * k, sign * v, sign * x)
    torch.testing.assert_close(out[:, :, :15], other[:, :, :15])
    assert (out - other)[:, :, 15:].abs().amax(-1).min() > 1e-3

    for wide in range(3):  # of which only the first 16 channels would count
        inputs = [q, k, v]
        inputs[wide] = inputs[wide].repeat(1, 1, 1, 2)
        with pytest.raises(ValueError, match=r"have \[16, 32\] channels in a head: they need head_dim=16"):
            ropewalk.attend(pe, *inputs, x)


def test_what_one_encoding_cannot_be():
    shape = {"n_head": 4, "head_dim": 16, "train_len": 32}
    with pytest.raises(ValueError, match="did you mean yarn"):
        ropewalk.encoding("yarm", **shape, scale=1.0)
    with pytest.raises(ValueError, match=r"did you mean .*scale"):
        ropewalk.encoding("yarn", **shape, scal=1.0)
    with pytest.raises(ValueError, match=r"there is: .*window"):
        ropewalk.encoding("alibi", **shape, base=1.0)
    with pytest.raises(ValueError, match=r"is a pattern over layers: build its parts.*rope.*nope"):
        ropewalk.encoding("hybrid", **shape)
    pe = ropewalk.encoding("cope", gates="projection", **shape)
    with pytest.raises(ValueError, match="CoPE needs 'gate_keys', made of the layer's input"):
        ropewalk.attend(pe, *torch.zeros(3, 1, 4, 8, 16))


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
    files |= {path.relative_to(source) for path in (source / "evaluation").rglob("page.*")}
    assert files
    assert not [str(file) for file in files if not (installed / file).is_file()]

    shutil.rmtree(source)
    use = "import ropewalk; ropewalk.encoding('yarn', n_head=2, head_dim=8, train_len=64); print(ropewalk.__file__)"
    beginnings = {("-c", use): f"{installed}/ropewalk.py", ("-m", "train", "--help"): "Train a small GPT"}
    for arguments, beginning in beginnings.items():
        done = subprocess.run([sys.executable, *arguments], cwd=installed, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(beginning)


@pytest.mark.parametrize("name", ["model", "data"])
def test_a_module_of_the_user_s_that_hides_ours_is_named(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("mine = 1\n")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import ropewalk"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert f"ImportError: Ropewalk's package {name!r} is hidden by {tmp_path}" in done.stderr
