"""What a step does in another way with several ranks, and with CUDA graphs."""

from types import SimpleNamespace

import torch

from ropewalk.training.ranks import Graphs


def test_graphs_keep_gradients_in_memory_of_their_own():
    """The next micro-batch overwrites what a graph returned, such as a first gradient; later ones are added to it."""
    net = torch.nn.Linear(3, 2)
    net.unused = torch.nn.Parameter(torch.ones(2))
    returned = []
    net.weight.register_post_accumulate_grad_hook(lambda p: returned.append(p.grad))
    fabric = SimpleNamespace(world_size=1, global_rank=0, backward=torch.Tensor.backward)
    ranks = Graphs(fabric, net, net)

    ranks.backward(net(torch.ones(1, 3)).sum())
    returned[0].fill_(torch.nan)
    assert torch.equal(net.weight.grad, torch.ones(2, 3))
    own_memory = net.weight.grad.data_ptr()
    ranks.backward(net(torch.ones(1, 3)).sum())
    assert torch.equal(net.weight.grad, 2 * torch.ones(2, 3))

    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.1)
    optimizer.step()
    ranks.zero_grad(optimizer)
    assert net.weight.grad.data_ptr() == own_memory
    assert torch.equal(net.weight.grad, torch.zeros(2, 3))
    # Weight decay would pull a parameter with a gradient of 0 towards 0.
    assert net.unused.grad is None
    assert torch.equal(net.unused, torch.ones(2))
