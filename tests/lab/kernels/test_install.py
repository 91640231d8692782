"""Kernels in whole networks, and the check that comes before them, in Triton's interpreter on a CPU."""

import os

import own_bias
import pytest
import torch
from conftest import at_last_scale, attend, build_gpt, build_pe, gradients_of, normal, tokens

from conf.options import options_of
from conf.schema import Trainer
from model import position
from model.layout import PackedContext
from model.position.layer import init_parameters
from ropewalk.training import distributed
from ropewalk.training.hardware import Hardware

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
from lab import kernels
from lab.kernels import check

END = 49
TRAINER = Trainer(**options_of("trainer", "default"))
T = 40
SMALL = {"n_head": 2, "n_kv_head": 1, "dim": 32}
SHAPE = position.Shape(
    dim=32,
    n_head=2,
    n_kv_head=1,
    head_dim=16,
    train_len=T,
    n_layer=1,
)


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    """Verdicts are kept for a test alone, whose checks may take their time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(check, "LIMIT", 3600.0)
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


def batch():
    """Inputs and targets [2, T]: rows of 4 documents, of which one is a token, and of 2."""
    idx, targets = tokens(T, 4, 49).split(2)
    idx[0, [6, 7, 30]] = END
    idx[1, 20] = END
    return idx, targets


@pytest.mark.parametrize(
    ("name", "pe", "cfg"),
    [
        ("rope", {"window": 9, "temperature": "log"}, {"sinks": True, "conv": 4, "key_offset": True}),
        ("fire", {"init_l": 10.0}, {}),
        ("cope", {}, {"n_layer": 1}),
    ],
)
def test_a_network_learns_the_same_from_documents_in_place(name, pe, cfg):
    net = build_gpt(name, train_len=T, pe=pe, **SMALL, **cfg).train()
    idx, targets = batch()
    hardware = Hardware("cpu", "32-true", compile=False, kernels=True)

    def step():
        read = distributed.packing_of(TRAINER, hardware, END, net.encodings)
        loss = net(idx, read(idx), targets=targets)
        return loss, *gradients_of(loss, net)

    expected = step()
    kernels.install(net.encodings)

    assert distributed.packing_of(TRAINER, hardware, END, net.encodings).shared is not None
    torch.testing.assert_close(step(), expected, rtol=1e-4, atol=1e-5)


def test_a_twin_has_the_name_of_its_class_and_its_copies_have_their_own_scale():
    pe = build_pe("yarn", train_len=8, window=5)
    q, k, v = normal(*[(1, 4, 30, 16)] * 3)

    def outputs():
        return attend(pe, q, k, v), attend(at_last_scale(pe), q, k, v)

    expected = outputs()
    kernels.install([pe])
    found = outputs()

    assert type(pe).__name__ == "Yarn"
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(*found)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("path", {}),
        ("dynamic_ntk", {}),
        ("cope", {"temperature": "log"}),
    ],
)
def test_documents_are_in_place_only_where_all_encodings_read_them_there(name, options):
    """Where others stand in for the network's own in one pass, documents are packed."""
    encodings = [build_pe("rope"), build_pe("kerple")]
    other = build_pe(name, train_len=200, **options)

    assert kernels.layout_of(encodings, END) is None

    kernels.install([*encodings, other])
    layout = kernels.layout_of(encodings, END)
    _, _, contexts = layout.contexts([other], batch()[0], None)

    assert kernels.layout_of([*encodings, other], END) is None
    assert isinstance(contexts[other], PackedContext)


def test_tensors_that_are_not_contiguous_are_refused():
    q = torch.randn(1, 20, 2, 16).transpose(1, 2)
    ends = [torch.arange(20, dtype=torch.int32)] * 2

    with pytest.raises(AssertionError, match="contiguous"):
        torch.ops.ropewalk.attention(q, q, q, *ends, torch.ones(2), [], "nothing", 1.0)


def test_a_run_whose_check_does_not_end_well_trains_in_blocks_and_says_so(capsys):
    net = build_gpt("nope", train_len=T, **SMALL)
    pe = own_bias.Kills(SHAPE)
    init_parameters(pe, torch.Generator())

    distributed.install_kernels([pe], Hardware("cpu", "bf16-mixed", compile=False, kernels=True))

    (said,) = capsys.readouterr().err.splitlines()

    assert "failed: exit code -9" in said
    assert not kernels.is_twin(pe)

    net(torch.zeros(1, T, dtype=torch.long), encodings=[pe, pe])


def test_a_verdict_is_kept_and_no_other_encodings_are_judged_by_it(monkeypatch):
    wrong = own_bias.Wrong(SHAPE)

    assert "Wrong: " in kernels.problem([wrong], "cpu")

    monkeypatch.setattr(check, "outcome_of", lambda *asked, **environment: "was asked again")

    assert "Wrong: " in kernels.problem([wrong], "cpu")

    of_another_shape = own_bias.Wrong(SHAPE._replace(head_dim=8))
    for other in (of_another_shape, own_bias.Own(SHAPE), build_pe("rope")):
        assert kernels.problem([other], "cpu") == "their check was asked again"

    assert kernels.problem([build_pe("path")], "cpu") == ""  # it has no kernels


def test_a_compiled_network_is_one_graph_with_kernels():
    net = build_gpt("kerple", train_len=20, **SMALL, sinks=True).train()
    kernels.install(net.encodings)
    idx = torch.arange(20).view(1, 20)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend="aot_eager")

    found = gradients_of(compiled(idx, targets=idx), net)
    torch._dynamo.reset()

    expected = gradients_of(net(idx, targets=idx), net)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
