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


BF16 = Hardware.resolve(accelerator="cpu", precision="bf16-mixed")
FP32 = Hardware.resolve(accelerator="cpu", precision="32-true")


def copies_of_weights(net, tensors):
    """Those in bf16 that have the shape of a matrix of a block."""
    matrices = [p for p in net.blocks.parameters() if p.ndim == 2 and min(p.shape) >= 64]
    shapes = {shape for p in matrices for shape in (p.shape, p.T.shape)}
    return [tensor for tensor in tensors if tensor.dtype == torch.bfloat16 and tensor.shape in shapes]


def test_no_copy_of_all_weights_stays_alive_and_positions_stay_exact(mesh):
    """In bf16-mixed autograd keeps activations only: no cast weights from forward to backward. Angles are fp32."""
    net = shard(build_gpt("cope_rope", n_layer=4, n_kv_head=4), mesh, BF16).train()
    for pe in net.distinct_encodings:
        assert not any(isinstance(parameter, DTensor) for parameter in pe.parameters())
    kept = []
    dtypes = []  # of a norm's weights, as under DDP, where autocast casts none, and of angles
    net.blocks[1].attn_norm.register_forward_pre_hook(lambda module, inputs: dtypes.append(module.weight.dtype))
    net.blocks[1].attn.register_forward_pre_hook(
        lambda module, inputs: dtypes.extend(table.dtype for table in inputs[2].tables)
    )

    def keep(tensor):
        kept.append(tensor)
        return tensor

    idx = torch.arange(8).view(1, 8)
    with BF16.autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = net(idx, targets=idx)
    assert dtypes == [torch.float32] * 3
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in copies_of_weights(net, kept))

    loss.backward()
    assert isinstance(net.blocks[0].attn.qkv.weight.grad, DTensor)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_sharded_network_is_the_network(mesh, checkpointing):
    """With documents, hidden states for an evaluation, loss and gradients."""
    whole = build_gpt("cope_rope", n_layer=4, n_kv_head=4)
    net = shard(build_gpt("cope_rope", n_layer=4, n_kv_head=4, checkpointing=checkpointing), mesh, FP32).train()
    idx = torch.arange(12).view(2, 6)
    with torch.no_grad(), evaluating(net):  # before the first step, too
        torch.testing.assert_close(net.head(net.hidden_states(idx)), whole.head(whole.hidden_states(idx)))

    documents = packed(idx, 8)
    for each in (net, whole):
        each(idx, documents, targets=idx).backward()
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
    shard(net, mesh, FP32)
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
