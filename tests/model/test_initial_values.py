"""Parameters of encodings start as their papers, or `nn.Linear`, say."""

import math

import pytest
import torch
from conftest import pe_options

from model.position import Shape, build_encodings
from model.position.layer import init_parameters

SHAPE = Shape(dim=512, n_head=256, n_kv_head=256, head_dim=4, train_len=64, n_layer=1)
UNIFORM = 1 / math.sqrt(12)  # standard deviation of a uniform number in [0, 1)


@pytest.mark.parametrize(
    ("name", "parameter", "mean", "std"),
    [
        ("kerple", "p", 1.0, 2 * UNIFORM),
        ("kerple", "a", 0.5, UNIFORM),
        ("fire", "down_weight", 0.0, 2 * 32**-0.5 * UNIFORM),  # of 32 hidden units
        ("t5", "table", 0.0, 512**-0.5),
        ("learned", "table", 0.0, 0.02),
        ("fox", "gate", 0.0, 0.02),
        ("relative", "distances", 0.0, 4**-0.5),
    ],
)
def test_initial_parameters_have_the_published_distribution(name, parameter, mean, std):
    (pe,) = build_encodings(pe_options(name), SHAPE)
    init_parameters(pe, torch.Generator().manual_seed(0))
    values = pe.get_parameter(parameter).detach()
    error = 4 / math.sqrt(values.numel())  # four standard errors, in standard deviations

    assert abs(float(values.mean()) - mean) < error * std
    assert float(values.std()) == pytest.approx(std, rel=error)


def test_gates_start_such_that_heads_forget_over_the_decay_times():
    """A geometric series of them: a key so many tokens away is weighed by 1/e."""
    (pe,) = build_encodings(pe_options("fox", decay_times=[0.5, 128.0]), SHAPE._replace(n_head=5))
    init_parameters(pe, torch.Generator().manual_seed(0))
    weights = pe.gate_bias.detach().double().sigmoid() ** torch.tensor([0.5, 2.0, 8.0, 32.0, 128.0])

    torch.testing.assert_close(weights, torch.full((5,), math.exp(-1), dtype=torch.float64), rtol=1e-5, atol=0)
