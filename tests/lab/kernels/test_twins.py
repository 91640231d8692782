"""Twins of encodings, whose attention kernels compute, against the encodings: in Triton's interpreter, on a CPU."""

from contextlib import suppress

import pytest
import torch
from conftest import attend, build_pe
from own_bias import Own

from model import position
from model.position.layer import init_parameters

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
import triton

from lab.kernels import biases, check, cope, twins

FP16 = torch.float16
FP32 = torch.float32


def encoding(name, *, gates=None, n_head=3, n_kv_head=1, head_dim=16, **options):
    """An encoding with random parameters; FoX's gates may be set."""
    if name == "own":
        pe = Own(position.Shape(64, n_head, n_kv_head, head_dim, 64, 1))
        init_parameters(pe, torch.Generator())
        return pe
    sizes = {"n_head": n_head, "n_kv_head": n_kv_head, "head_dim": head_dim, "train_len": 64}
    pe = check.small(build_pe(name, **sizes | options))
    if gates is not None:
        with torch.no_grad():
            pe.gate.mul_(0.1)
            pe.gate_bias.fill_(gates)
    return pe


def assert_right(pe, length, dtype=FP32, *, documents=True):
    """Errors are at most twice those in PyTorch, and what rounding leaves: terms of the gradient of a gate cancel."""
    limits = {"rounded": 2e-3, "exact": 3e-5}
    for name, error in check.errors(pe, length, dtype, documents=documents, **limits).items():
        assert error.is_right, (name, error)


CASES = {
    "rope, window of one, tiles that 16 divides": ("rope", {"window": 1, "head_dim": 64}, 192, FP16),
    "rope, window": ("rope", {"window": 20}, 100, FP32),
    "own bias of the distance": ("own", {}, 129, FP32),
    "t5, window, 80 channels": ("t5", {"window": 40, "head_dim": 80}, 150, FP16),
    "fox, strong gates": ("fox_rope", {"window": 100, "gates": 12.0}, 128, FP32),
    "fox, constant gates": ("fox", {"constant_gates": True}, 70, FP16),
    "alibi, learned slopes": ("alibi", {"learned": True}, 70, FP16),
    "fire": ("fire", {"init_l": 20.0}, 100, FP32),
    "cope": ("cope", {}, 130, FP32),
    "cope, 16 bit": ("cope", {"scaling": "code"}, 130, FP16),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_all_gradients_are_those_of_the_encoding(case, monkeypatch):
    """As near to float64 as the encoding in PyTorch. CoPE takes chunks of 64 queries here."""
    monkeypatch.setattr(cope, "CHUNK", 64)
    name, options, length, dtype = CASES[case]

    assert_right(encoding(name, **options), length, dtype)


@pytest.mark.parametrize(
    ("gates", "window"),
    [
        (-12.0, 100),
        (-3.0, 40),
    ],
)
def test_gates_that_let_little_pass_have_exact_gradients(gates, window):
    """Of a query's own key, whose weight is nearly 1, nothing reaches the gates."""
    pe = encoding("fox_rope", n_head=1, window=window, gates=gates)
    errors = check.errors(pe, 127, FP32)
    for name in ("x", "gate", "gate_bias"):
        assert errors[name].value < 5e-5, errors


@triton.jit
def wrong_sign(scores, rows, tile, size):
    return 2 * scores - biases.row_score(scores, rows, tile, size)


def one_key_too_many(q, ctx):
    first, last = SEEN_KEYS(q, ctx)
    return (first - 1).clamp(min=0), last


def in_16_bit(pe, q, state, ctx):
    (row,) = OF_DISTANCES(pe, q, state, ctx)
    return (row.bfloat16().float(),)


def on_another_device(pe, q, state, ctx):
    (row,) = OF_DISTANCES(pe, q, state, ctx)
    return (row.to("meta"),)


SEEN_KEYS = twins.seen_keys
OF_DISTANCES = twins.of_distances


PLANTED = {
    "sign": (biases.BIASES, "row", biases.ROW._replace(score=wrong_sign)),
    "gradient": (biases.BIASES, "row", biases.ROW._replace(key_grad=biases.no_grad)),
    "mask": (vars(twins), "seen_keys", one_key_too_many),
    "dtype": (vars(twins), "of_distances", in_16_bit),
    "device": (vars(twins), "of_distances", on_another_device),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_the_check_finds_a_wrong_kernel(defect, monkeypatch):
    pe = encoding("kerple", window=20)

    def is_right():
        return all(error.is_right for error in check.errors(pe, 70, FP16).values())

    assert is_right()

    monkeypatch.setitem(*PLANTED[defect])

    with suppress(NotImplementedError):  # of a tensor on another device
        assert not is_right()


def test_where_no_kernel_serves_the_specification_does():
    """One token of a cache, and float64; an encoding of another class, although its base has a twin."""
    pe = encoding("kerple", n_head=2)
    twin = encoding("kerple", n_head=2)
    twin.__class__ = twins.twin_of(type(twin))
    q, k, v = torch.randn(3, 1, 2, 20, 16)
    newest = q[:, :, -1:]

    assert torch.equal(
        attend(twin, newest, k, v),
        attend(pe, newest, k, v),
    )

    q, k, v = (x.double() for x in (q, k, v))

    assert torch.equal(attend(twin, q, k, v), attend(pe, q, k, v))

    other = type(
        "Other",
        (type(pe),),
        {"bias": lambda self, q, ctx: torch.zeros(2, 20, 20)},
    )

    assert twins.bias_of(other) is None


KINDS = {
    "rope": {"window": 1},
    "fox": {"gates": 12.0, "window": 100},
    "fox_rope": {"gates": -3.0, "window": 40},
    "t5": {},
    "kerple": {"window": 30},
    "fire": {"init_l": 50.0},
    "cope": {"npos_max": 6},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 192, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_all_lengths_and_widths(kind, length, head_dim, dtype, monkeypatch):
    """Windows of one, documents of one token, sinks at 30, gates at 12 and -3, among groups of three heads."""
    monkeypatch.setattr(cope, "CHUNK", 64)
    pe = encoding(kind, head_dim=head_dim, **KINDS[kind])

    assert_right(pe, length, dtype, documents=False)

    # Behind a sink at 30 outputs may be so small that fp16 rounds them to multiples of its smallest number.
    monkeypatch.setattr(check, "SINKS", 30.0 if dtype == FP32 else 8.0)
    if length > 3:
        assert_right(pe, length, dtype)
