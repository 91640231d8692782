"""FSDP on one process: what autograd keeps; and the batches that ranks share. See also test_processes.py."""

import itertools

import pytest
import torch
import torch.distributed as dist
from conftest import build_gpt
from torch.distributed.tensor import DTensor

from model.reading import packed
from ropewalk.training import distributed
from ropewalk.training.hardware import Hardware
from ropewalk.training.sharding import assign, evaluating, full_tensor, shard


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
    yield torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


def test_no_copy_of_all_weights_stays_alive_and_positions_stay_exact(mesh):
    """In bf16-mixed autograd keeps activations only: no cast weights from forward to backward. Angles are fp32."""
    hardware = Hardware.resolve(accelerator="cpu", precision="bf16-mixed")
    net = shard(build_gpt("cope_rope", n_layer=4, n_kv_head=4), mesh, hardware).train()
    for pe in net.distinct_encodings:
        for parameter in pe.parameters():
            assert not isinstance(parameter, DTensor)

    idx = torch.arange(8).view(1, 8)
    kept = []
    angles = []
    norms = []
    net.blocks[1].attn_norm.register_forward_pre_hook(lambda module, inputs: norms.append(module.weight.dtype))
    net.blocks[1].attn.register_forward_pre_hook(lambda module, inputs: angles.extend(inputs[2].tables))

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with hardware.autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = net(idx, targets=idx)
    assert [angle.dtype for angle in angles] == [torch.float32] * 2
    assert norms == [torch.float32]  # as under DDP, where autocast casts none

    shapes_of_weights = set()
    for parameter in net.blocks.parameters():
        if parameter.ndim == 2 and min(parameter.shape) >= 64:
            shapes_of_weights |= {parameter.shape, parameter.T.shape}
    for tensor in kept:
        if tensor.dtype == torch.bfloat16 and tensor.shape in shapes_of_weights:
            assert tensor.untyped_storage().nbytes() == 0

    loss.backward()
    assert isinstance(net.blocks[0].attn.qkv.weight.grad, DTensor)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_sharded_network_is_the_network(mesh, checkpointing):
    """With documents, hidden states for an evaluation, loss and gradients."""
    net = build_gpt("cope_rope", n_layer=4, n_kv_head=4, checkpointing=checkpointing)
    whole = build_gpt("cope_rope", n_layer=4, n_kv_head=4)
    shard(net, mesh, Hardware.resolve(accelerator="cpu", precision=32)).train()
    idx = torch.arange(12).view(2, 6)
    documents = packed(idx, 8)
    with torch.no_grad(), evaluating(net):  # before the first step, too
        logits = net.head(net.hidden_states(idx))
        torch.testing.assert_close(logits, whole.head(whole.hidden_states(idx)))

    net(idx, documents, targets=idx).backward()
    whole(idx, documents, targets=idx).backward()
    for (name, sharded), parameter in zip(net.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(sharded.grad), parameter.grad, msg=name)


@pytest.mark.parametrize(("n", "step", "world"), [(7, 2, 2), (1, 4, 3), (8, 2, 4), (0, 2, 2)])
def test_ranks_share_the_batches_equally(monkeypatch, n, step, world):
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(distributed.shared_batches(n, step))
    assert len(set(map(len, shares))) == 1
    starts = [start for start in itertools.chain(*shares) if start is not None]
    assert sorted(starts) == list(range(0, n, step))


@pytest.mark.parametrize("name", ["cope_rope", "fire", "t5"])
def test_weights_are_initialised_on_their_shard(mesh, name):
    """On "meta" until they are sharded, then with the same bits, tied, and with one whole parameter at a time."""
    with torch.device("meta"):
        net = build_gpt(name, tie_embeddings=True)
    shard(net, mesh, Hardware.resolve(accelerator="cpu", precision=32))
    whole_sizes = []

    def look(parameter, values):
        assert parameter.device.type == "cpu"
        whole_sizes.append(values.numel())
        assign(parameter, values)

    net.init_weights(0, look)
    assert sum(whole_sizes) == sum(p.numel() for p in net.parameters())
    assert net.head.weight is net.embedding.weight
    whole = build_gpt(name, tie_embeddings=True)
    whole.init_weights(0)
    for (name, sharded), parameter in zip(net.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(full_tensor(sharded.detach()), parameter), name
    idx = torch.arange(12).view(2, 6)
    torch.testing.assert_close(net(idx, targets=idx), whole(idx, targets=idx))
