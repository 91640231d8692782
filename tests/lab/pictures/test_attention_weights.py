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


def test_gates_made_of_the_values_are_refused():
    net = build_gpt("cope", pe={"gates": "values"})
    with pytest.raises(ValueError, match=r"pe\.gates=values"):
        attended(net, torch.arange(8)[None], [7])
