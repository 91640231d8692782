"""The Python interface, on a run as a user has it."""

import math
import shutil
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from conftest import ENCODINGS, attend, normal, pe_options

import ropewalk
from conf.schema import GPTConfig
from model.gpt import GPT
from ropewalk.run.directory import read_config


@pytest.fixture
def run(straight) -> Path:
    return straight("pe=rope", "eval.by_position=false", "eval.far_copies=false")


def test_a_trained_model_gives_logits(run):
    model = ropewalk.load(run)
    ids = model.encode("knots")

    assert model.data.decode(ids.tolist()) == "knots"

    expected = model.net(ids[None])[0, :, :257]

    assert torch.equal(model.logits("knots"), expected)
    assert torch.equal(model.logits(ids), expected)


def test_a_run_is_read_by_another_encoding(run):
    rope = ropewalk.load(run)
    yarn = ropewalk.load(run, pe="yarn", scale=8.0)
    long = "knots in a rope; " * 4
    short = long[:16]  # the training length

    assert torch.equal(rope.logits(short), yarn.logits(short))
    assert not torch.allclose(rope.logits(long), yarn.logits(long), atol=1e-3)
    with pytest.raises(ValueError, match="scale: options of an encoding need its name"):
        ropewalk.load(run, pe=read_config(run)["pe"], scale=8.0)


SHAPES = {
    "q": (2, 4, 24, 16),
    "k": (2, 2, 24, 16),
    "v": (2, 2, 24, 16),
    "x": (2, 24, 64),
}


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name != "hybrid"])
def test_an_encoding_for_a_network_of_ones_own(name):
    """It attends as in a layer of ours."""
    pe = ropewalk.encoding(name, n_head=4, n_kv_head=2, head_dim=16, train_len=32)
    tensors = normal(*SHAPES.values())

    assert torch.equal(ropewalk.attend(pe, *tensors, embedded=True), attend(pe, *tensors))


def zeros(names, kind):
    """Tensors of another type under these names."""
    return {name: torch.zeros(SHAPES[name], dtype=kind) for name in names}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # The layout of other libraries.
        ({"q": torch.zeros(2, 24, 4, 16)}, r"q is .*use transpose\(1, 2\) if it is \[B, T, H, D\]"),
        ({"q": torch.zeros(2, 4, 1, 16)}, "k is .* there is no cache"),  # one query with a cache
        ({"q": torch.zeros(2, 8, 24, 16)}, "q is"),
        ({"q": torch.zeros(4, 24, 16)}, r"q is \(4, 24, 16\), not"),
        ({"k": torch.zeros(1, 2, 24, 16)}, "k is"),
        ({"v": torch.zeros(2, 2, 23, 16)}, "v is"),
        ({"v": torch.zeros(2, 2, 24, 8)}, "v is"),
        ({"x": torch.zeros(2, 25, 64)}, "x is"),
        *((zeros("qkv", kind), f"{kind} on cpu") for kind in (torch.int64, torch.bool, torch.complex64)),
        (zeros("qkvx", torch.float64), "torch.float64 on cpu"),
        (zeros("k", torch.float64), "torch.float64 on cpu"),
    ],
)
def test_tensors_of_another_shape_or_type_are_refused(changes, message):
    pe = ropewalk.encoding("cope", n_head=4, n_kv_head=2, head_dim=16, train_len=32)
    with pytest.raises(ValueError, match=message):
        ropewalk.attend(pe, **zeros("qkvx", torch.float32) | changes)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("learned", {}, "embed"), ("sinusoidal", {}, "embed"), ("cope", {"gates": "projection"}, "pass it as x")],
)
def test_what_an_encoding_needs_is_not_left_out_in_silence(name, options, message):
    pe = ropewalk.encoding(name, n_head=4, head_dim=16, train_len=32, **options)
    q, k, v = torch.zeros(3, 1, 4, 8, 16)
    with pytest.raises(ValueError, match=message):
        ropewalk.attend(pe, q, k, v)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("yarm", {"scale": 1.0}, "yarn"),
        ("yarn", {"scal": 1.0}, "scale"),
        ("hybrid", {}, r"rope.*nope"),
        ("rope", {"n_head": 0}, "n_head"),
        ("rope", {"n_kv_head": 3}, "n_kv_head"),
        ("rope", {"train_len": 2**40}, "train_len"),
        ("rope", {"base": 1e301}, "base"),
        ("cope", {"npos_max": 10**12}, "npos_max"),
        ("relative", {"max_distance": 0}, "max_distance"),
        ("rope", {"n_head": "4", "head_dim": 8.0}, "(?s)2 validation errors.*n_head.*head_dim"),
    ],
)
def test_what_an_encoding_cannot_be_is_refused(name, options, message):
    sizes = {"n_head": 4, "head_dim": 16, "train_len": 32}
    with pytest.raises(ValueError, match=message):
        ropewalk.encoding(name, **(sizes | options))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"train_len": size}, "train_len=") for size in (0, -1, 16.5, math.inf, 2**62)]
    + [({"vocab_size": size}, "vocab_size=") for size in (0, -1, 20.0)],
)
def test_a_network_of_no_size_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        GPT(GPTConfig(), pe_options("rope"), **({"train_len": 16, "vocab_size": 9} | sizes))
    with pytest.raises(ValueError, match="init_std"):
        GPTConfig(init_std=math.inf)


@pytest.mark.parametrize("device", ["tpu", "meta", "", "auto"])
def test_a_device_that_is_not_here_is_refused(run, device):
    with pytest.raises(ValueError, match=f"device='{device}' is not available here"):
        ropewalk.load(run, device=device)


NO_IDS = [
    torch.tensor([True]),
    torch.tensor([1.0]),
    torch.tensor([1j]),
    torch.tensor(1),
    torch.tensor([[1]]),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([-1]),
    torch.tensor([257]),
]


@pytest.mark.parametrize("ids", NO_IDS, ids=str)
def test_what_is_no_token_ids_is_refused(run, ids):
    model = ropewalk.load(run)
    for read in (model.logits, model.generate):
        with pytest.raises(ValueError, match=r"is not token ids|token id|the prompt is empty"):
            read(ids)
    if ids.dim() != 2:
        with pytest.raises(ValueError, match="token ids must be"):
            model.net(ids)


def test_two_streams_do_not_change_each_other(run):
    """Nor the network: at scale 4 and at scale 1, interleaved, each writes what it writes alone."""
    model = ropewalk.load(run, pe="yarn", scale=4.0)
    logits = model.logits("knots")
    lengths = (60, 6)  # the first goes beyond the training length of 16, with its prompt
    alone = [model.generate("knots", n, temperature=0) for n in lengths]

    streams = [model.stream("knots", n, temperature=0) for n in lengths]
    interleaved = zip(*zip_longest(*streams, fillvalue=""), strict=True)

    assert ["".join(pieces) for pieces in interleaved] == alone
    assert torch.equal(model.logits("knots"), logits)


@pytest.mark.parametrize(("option", "value"), [("temperature", -1.0), ("top_k", 0), ("max_new_tokens", 0)])
def test_an_option_of_sampling_out_of_range_is_refused(run, option, value):
    with pytest.raises(ValueError, match=option):
        ropewalk.load(run).generate("knots", **{option: value})


def test_a_checkpoint_is_looked_at(train, trained):
    """Of a run that was stopped: the newest, or the one that is asked for."""
    evaluation = ["eval.variants=[]", "eval.lengths=[1]"]
    whole = trained("pe=rope", "trainer.keep_checkpoints=9", *evaluation, name="whole")
    stopped = shutil.copytree(whole, train.runs / "stopped")
    for name in ("model.json", "model.safetensors", "training.json", "checkpoints/step=6.ckpt"):
        (stopped / name).unlink()

    saved = torch.load(whole / "checkpoints" / "step=4.ckpt")["model"]["embedding.weight"]

    assert torch.equal(ropewalk.load(stopped).net.embedding.weight, saved)
    assert torch.equal(ropewalk.load(whole, step=4).net.embedding.weight, saved)
    assert not torch.equal(ropewalk.load(whole).net.embedding.weight, saved)

    with pytest.raises(ValueError, match=r"\[2, 4, 6\]"):
        ropewalk.load(whole, step=0)
