"""The weights of attention that are read from the gradient by the values are those that attention applies."""

import pytest
import torch
from conftest import build_gpt, build_pe

from lab.pictures.attention_weights import attended, weights_of
from model.position.layer import make_context

TOKENS = 16  # as many as channels of a head
QUERIES = [5, 15]


def attention_of(pe):
    """Attention over random queries and keys as a function of the values."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, TOKENS, 16)
    k = torch.randn(2, 2, TOKENS, 16)
    state = pe.state(torch.randn(2, TOKENS, 64))
    ctx = make_context(pe, torch.arange(TOKENS), TOKENS, TOKENS)
    return lambda v: pe.attend(q, k, v, state, ctx)


def named(attend):
    """The output for values that name their token: channel j is the weight of token j."""
    zeros = torch.zeros(2, 2, TOKENS, 16)
    tokens = torch.eye(16).expand_as(zeros)
    # What an encoding adds to the values is not read from them.
    return (attend(tokens) - attend(zeros))[:, :, QUERIES]


def test_weights_are_the_output_for_values_that_name_their_token(encoding):
    attend = attention_of(build_pe(encoding, n_kv_head=2))
    weights = weights_of(attend, torch.randn(2, 2, TOKENS, 16), QUERIES)
    torch.testing.assert_close(weights, named(attend).abs(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotated_values_do_not_change_the_weights(layout):
    rotated = attention_of(build_pe("rope", n_kv_head=2, layout=layout, values=True))
    plain = attention_of(build_pe("rope", n_kv_head=2, layout=layout))
    weights = weights_of(rotated, torch.randn(2, 2, TOKENS, 16), QUERIES)
    torch.testing.assert_close(weights, named(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["rope", "fox", "cope_rope"])
def test_weights_in_a_network(name):
    """The weights times the values are the layer's output, before its projection; and recording changes nothing."""
    net = build_gpt(name)
    ids = torch.arange(40)[None]
    attention = net.blocks[0].attn
    seen = {}

    def keep(module, inputs, output):
        seen["input"] = inputs[0]
        seen["output"] = output

    attention.register_forward_hook(keep)
    hidden = net.hidden_states(ids)
    expected = seen["output"]
    layers = attended(net, ids, range(40))
    assert len(layers) == 2
    assert torch.equal(seen["output"], expected)
    assert torch.equal(net.hidden_states(ids), hidden)

    weights = layers[0].weights[0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 40))
    _, _, v = attention.split(attention.qkv(seen["input"]))
    v = v[0].repeat_interleave(2, dim=1).transpose(0, 1)  # [H, T, D]
    read = (weights @ v).transpose(0, 1).flatten(1)  # [T, H D]
    torch.testing.assert_close(seen["output"][0], attention.out(read), rtol=1e-4, atol=1e-4)


def test_gates_made_of_the_values_are_refused():
    net = build_gpt("cope", pe={"gates": "values"})
    with pytest.raises(ValueError, match=r"pe\.gates=values"):
        attended(net, torch.arange(8)[None], [7])
