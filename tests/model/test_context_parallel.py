"""A text that several ranks read together gives the loss and all gradients that one process computes.

The gradients matter: if those of gathered keys were not summed over the ranks, no loss would tell.
"""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import ENCODINGS, PRESETS, build_gpt, gradients_of, read_at
from process_helpers import CONTEXT, ended

from model.gpt import GPT
from model.layout import IGNORE_INDEX, WHOLE
from model.position.network import max_len_of, scales_of
from ropewalk.training.context_parallel import Shared

# What the YAMLs leave out.
OTHERS = {
    "rope, sinks, ssmax": {"name": "rope", "sinks": True, "pe": {"temperature": "ssmax"}},
    "fox, window": {"name": "fox", "pe": {"window": 7}, "checkpointing": True},
    "cope, gates": {"name": "cope", "pe": {"gates": "projection", "npos_max": 5}},
}
CASES = {name: {"name": name} for name in [*ENCODINGS, *PRESETS]} | OTHERS


def loss_and_gradients(net: GPT, x: torch.Tensor, y: torch.Tensor, layout, encodings) -> list[torch.Tensor]:
    """Those of the parameters; of a text that ranks share the means over the ranks."""
    loss = net(x, layout, encodings=encodings, targets=y)
    values = [loss.detach(), *gradients_of(loss, net)]
    if layout is not WHOLE:
        for value in values:
            dist.all_reduce(value)
            value /= dist.get_world_size()
    return values


def error(length: int, *, checkpointing: bool = False, **options) -> float:
    """The largest difference of the loss or of a parameter's gradient from one process, at any scale, in float64.

    Relative to its norm; that of a gradient that is zero but for rounding counts as 1 % of that of all gradients.
    """
    net = build_gpt(train_len=16, init_std=0.125, checkpointing=checkpointing, **options).double()
    shared = Shared(dist.group.WORLD, recompute=not checkpointing)
    texts = torch.randint(
        50,
        (2, 2, length),
        generator=torch.Generator().manual_seed(2),
    )
    texts[1, 0, : -length // 8] = IGNORE_INDEX  # some pieces have no target
    errors = []
    for scale in scales_of(net.encodings):
        encodings = read_at(net, scale)
        x, y = texts[:, :, : max_len_of(encodings)]
        expected = loss_and_gradients(net, x, y, WHOLE, encodings)
        found = loss_and_gradients(net, x, y, shared, encodings)
        small = 0.01 * torch.stack([value.norm() for value in expected]).norm()
        for a, b in zip(found, expected, strict=True):
            relative = (a - b).norm() / (b.norm() + small)
            errors.append(relative.item())
    return max(errors)


def measure(rank: int, world: int, length: int, folder: Path) -> None:
    """Write the errors of all cases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    errors = {}
    with patch.object(torch.Tensor, "float", torch.Tensor.double):
        for case, options in CASES.items():
            errors[case] = error(length, **options)
    (folder / str(rank)).write_text(json.dumps(errors))
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "length"),
    [
        (2, 45),
        pytest.param(4, 90, marks=pytest.mark.slow),
        pytest.param(2, 530, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_a_text_have_the_loss_and_gradients_of_one(tmp_path, world, length):
    """Of texts that cannot be cut into equal pieces; the pieces of the longest are longer than a block of queries."""
    ranks = [CONTEXT.Process(target=measure, args=(rank, world, length, tmp_path)) for rank in range(world)]
    for process in ranks:
        process.start()
    ended(ranks)
    for rank in range(world):
        errors = json.loads((tmp_path / str(rank)).read_text())
        assert errors.keys() == CASES.keys()
        assert {case: error for case, error in errors.items() if error > 1e-10} == {}
