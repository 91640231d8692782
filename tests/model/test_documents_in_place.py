"""Packed documents read in place by kernels, in Triton's interpreter, against the same documents taken out."""

import pytest
import torch
from conftest import ENCODINGS, PRESETS, build_gpt, build_pe, pe_options
from hypothesis import given
from hypothesis import strategies as st
from model.documents import DocumentsInPlace, find_documents, places, positions_in_place
from torch._dynamo.testing import CompileCounterWithBackend

from model.attention import attention, in_blocks
from model.position import PositionEncoding
from model.position.layer import make_context
from model.position.rotary import Rotary

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

END = 49
T = 70  # some tiles, the last one not full
IN_PLACE = {
    "abf", "alibi", "cope", "cope_rope", "fire", "fox", "fox_rope", "gemma3", "gpt_oss", "hybrid", "kerple", "learned",
    "linear", "llama3", "llama4", "nape", "nope", "ntk", "ntk_by_parts", "olmo3", "p_rope", "pope", "profiles",
    "relative", "relative_capped", "rnope_swa", "rope", "rope_id", "sinusoidal", "smollm3", "stick_breaking", "t5",
    "yarn",
}  # fmt: skip


def network(name, pe=None, *, sinks=True, **cfg):
    """A small network with grouped heads that tells documents apart; `pe` replaces options of the encoding's YAML."""
    layers = len(pe_options(name).get("pattern", [1]))
    net = build_gpt(name, pe=pe, train_len=T, sinks=sinks, **{"n_layer": layers} | cfg).train()
    net.document_end = END
    return net


def batch(seed=0):
    """Inputs and targets [3, T]: rows of 5, 2 and 1 documents, of odd lengths; one has a single token."""
    idx, targets = torch.randint(49, (2, 3, T), generator=torch.Generator().manual_seed(seed))
    idx[0, [6 + seed, 7 + seed, 30, 33]] = END
    idx[1, 40 - seed] = END
    return idx, targets


def step(net, idx, targets):
    """The loss and all its gradients; zeros for parameters without one."""
    loss = net(idx, targets=targets, documents=net.documents(idx))
    gradients = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, materialize_grads=True)
    return loss.detach(), gradients


def check(net):
    """Check that kernels, in place, and the specification, on documents taken out, learn the same."""
    idx, targets = batch()
    expected = step(net, idx, targets)
    net.kernels = True
    assert isinstance(net.documents(idx), DocumentsInPlace)
    found = step(net, idx, targets)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


MANY_LAYERS = {"gemma3", "llama4", "olmo3", "rnope_swa", "smollm3"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MANY_LAYERS)) for name in sorted(IN_PLACE)]
)
def test_loss_and_gradients_are_those_of_documents_taken_out(name):
    net = network(name, sinks=False)
    with net.at_scale(max(net.scales)):
        check(net)


@pytest.mark.parametrize("name", ["alibi", "cope", "fox", "kerple", "profiles", "rope", "stick_breaking"])
def test_a_window_is_one_within_the_document(name):
    check(network(name, {"window": 9}, sinks=name != "stick_breaking"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rope", {"temperature": "log"}),
        ("rope", {"temperature": "llama4"}),
        ("alibi", {"temperature": "ssmax"}),
        ("pope", {"temperature": "ssmax", "window": 9}),
        ("cope", {"temperature": "log"}),
        ("rope", {"temperature": "head"}),
        ("rope", {"values": True}),
        ("rope", {"partial_rotary_factor": 0.5, "resonance": True}),
        ("cope", {"gates": "projection", "shared": True}),
    ],
)
def test_temperatures_and_other_options_know_the_place_in_the_document(name, options):
    net = network(name, options)
    for pe in net.distinct_encodings:
        pe.train_len = 5  # within a document, so that "log" and "llama4" differ from 1 there
    check(net)


def test_convolutions_and_offsets_stay_within_documents():
    check(network("rope", n_layer=2, conv=4, conv_at="ABCD", key_offset=True))


@pytest.mark.parametrize("window", [None, 9])
def test_the_share_of_clamped_positions_is_that_of_pairs_within_documents(window):
    length = 64  # every query is looked at
    pe = build_pe("cope", n_head=2, head_dim=16, npos_max=4, window=window)
    q, k = torch.randn(2, 3, 2, length, 16, generator=torch.Generator().manual_seed(0))
    pos = positions_in_place(batch()[0][:, :length], END)
    ctx = make_context(pe, torch.arange(length), length, length, kernels=True, places=places(pos, window))
    gates = (q @ k.mT * ctx.scale).sigmoid()
    clamped = pairs = 0
    for row in range(3):
        for i in range(length):
            for j in range(i - int(pos[row, i]), i + 1):
                if i - j < (window or length):
                    clamped += int((gates[row, :, i, j : i + 1].sum(-1) >= 3).sum())
                    pairs += 2
    assert 0 < clamped < pairs
    assert float(pe._clamped_share(q, k, ctx)) == pytest.approx(clamped / pairs, abs=1e-6)


def test_the_list_of_those_in_place_is_complete():
    """All others keep the specification: their attention depends on more than distances, or has no kernel."""
    found = {name for name in [*ENCODINGS, *PRESETS] if all(pe.in_place for pe in network(name, sinks=False).encodings)}
    assert found == IN_PLACE


@given(st.integers(1, 3), st.integers(1, 40), st.floats(0, 1), st.sampled_from([None, 1, 5]), st.integers(0, 99))
def test_each_token_sees_its_document_and_no_other(n, length, share, window, seed):
    draws = torch.rand(n, length, generator=torch.Generator().manual_seed(seed))
    idx = torch.where(draws < share, END, 0)
    found = places(positions_in_place(idx, END), window)
    for row in range(n):
        document = [0] * length  # the number of each token's document
        for t in range(1, length):
            document[t] = document[t - 1] + (idx[row, t - 1] == END)
        for t in range(length):
            seen = [j for j in range(t + 1) if document[j] == document[t] and t - j < (window or length)]
            seeing = [i for i in range(t, length) if document[i] == document[t] and i - t < (window or length)]
            assert (found.first[row, t], found.last[row, t]) == (min(seen), max(seeing))
            assert found.pos[row, t] == t - document.index(document[t])


def test_documents_change_and_the_graph_stays():
    net = network("hybrid", conv=4, conv_at="A")
    net.kernels = True
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend=counter)
    parameters = list(net.parameters())
    alone = torch.randint(49, (2, 1, T), generator=torch.Generator().manual_seed(5)).unbind()
    packed = [x[:1] for x in batch()]
    for idx, targets in (packed, alone):
        documents = net.documents(idx)
        found = compiled(idx, targets=targets, documents=documents)
        expected = net(idx, targets=targets, documents=documents)
        gradients = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (found, expected)]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 1
    torch._dynamo.reset()


class Mine(Rotary):
    """A user's own encoding, which says nothing of documents."""


class Wrong(PositionEncoding):
    """A user's own encoding that says it reads documents in place, and attends without kernels."""

    in_place = True

    def attend(self, q, k, v, state, ctx):
        return in_blocks(lambda q, k, v, ctx: attention(q, k, v, ctx), (q,), (k, v), ctx)


def test_an_encoding_of_your_own_is_read_as_before_and_a_wrong_promise_is_refused():
    idx, targets = batch()
    net = network("rope")
    net.kernels = True
    net.encodings[0].__class__ = Mine
    assert not isinstance(net.documents(idx), DocumentsInPlace)
    net = network("nope")
    net.kernels = True
    net.encodings[0].__class__ = Wrong
    with pytest.raises(ValueError, match="in_place=True"):
        net(idx, targets=targets, documents=net.documents(idx))


def test_a_row_longer_than_the_encoding_is_defined_for_is_read_document_by_document():
    net = network("learned")
    net.kernels = True
    idx = torch.zeros(1, 2 * T, dtype=torch.long)
    idx[:, ::16] = END
    assert isinstance(net.documents(idx[:, :T]), DocumentsInPlace)
    assert len(net.documents(idx).rows) == len(find_documents(idx, END).rows)
    net(idx, documents=net.documents(idx))
