"""FSDP on one process: how much of it is whole at a time. That it computes the same: see test_processes.py."""

import pytest
import torch
import torch.distributed as dist
from conftest import build_gpt
from torch.distributed.tensor import DTensor

from model.layout import packed
from ropewalk.training.hardware import Hardware
from ropewalk.training.ranks import assign, full_tensor, shard

BF16 = Hardware.resolve(accelerator="cpu", precision="bf16-mixed")
FP32 = Hardware.resolve(accelerator="cpu", precision="32-true")


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
    yield torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


def sharded(mesh, hardware, **options):
    """A network of four layers in shards, with the weights of `build_gpt`."""
    with torch.device("meta"):
        net = build_gpt("cope_rope", n_layer=4, n_kv_head=4, **options)
    shard(net, mesh, hardware)
    for p, values in zip(net.parameters(), build_gpt("cope_rope", n_layer=4, n_kv_head=4).parameters(), strict=True):
        assign(p, values)
    return net.train()


def test_no_copy_of_all_weights_stays_alive_and_positions_stay_exact(mesh):
    """In bf16-mixed autograd keeps activations only: no cast weights from forward to backward. Angles are fp32."""
    net = sharded(mesh, BF16)

    for pe in net.distinct_encodings:
        assert not any(isinstance(parameter, DTensor) for parameter in pe.parameters())

    kept = []
    dtypes = []  # of a norm's weights, as under DDP, where autocast casts none, and of angles

    def look(attention, inputs):
        _, _, context = inputs
        dtypes.extend(table.dtype for table in context.tables)

    def keep(tensor):
        kept.append(tensor)
        return tensor

    block = net.blocks[1]
    block.attn_norm.register_forward_pre_hook(lambda norm, inputs: dtypes.append(norm.weight.dtype))
    block.attn.register_forward_pre_hook(look)
    idx = torch.arange(8).view(1, 8)
    with BF16.autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = net(idx, targets=idx)

    assert dtypes == [torch.float32] * 3

    matrices = [p for p in net.blocks.parameters() if p.ndim == 2 and min(p.shape) >= 64]
    shapes = {p.shape for p in matrices} | {p.T.shape for p in matrices}
    cast = [tensor for tensor in kept if tensor.dtype == torch.bfloat16 and tensor.shape in shapes]

    assert {tensor.untyped_storage().nbytes() for tensor in cast} == {0}

    loss.backward()

    assert isinstance(net.blocks[0].attn.qkv.weight.grad, DTensor)


def test_with_documents_and_checkpointing_gradients_are_those_of_the_whole_network(mesh):
    """What test_processes.py trains without."""
    whole = build_gpt("cope_rope", n_layer=4, n_kv_head=4)
    net = sharded(mesh, FP32, checkpointing=True)
    idx = torch.arange(12).view(2, 6)
    documents = packed(idx, 8)
    net(idx, documents, targets=idx).backward()
    whole(idx, documents, targets=idx).backward()
    gradients = [full_tensor(p.grad) for p in net.parameters()]
    torch.testing.assert_close(gradients, [p.grad for p in whole.parameters()])


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

    values = [full_tensor(p.detach()) for p in net.parameters()]
    torch.testing.assert_close(values, [p.detach() for p in whole.parameters()], rtol=0, atol=0)
