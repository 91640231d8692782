"""FSDP on one process: what autograd keeps; and the batches that ranks share. See also test_processes.py."""

import pytest
import torch
import torch.distributed as dist
from conftest import build_gpt
from torch.distributed.tensor import DTensor

from model.documents import find_documents
from training import distributed
from training.hardware import Hardware
from training.sharding import evaluating, full_tensor, shard


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
    yield torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


def test_no_copy_of_all_weights_stays_alive_and_positions_stay_exact(mesh):
    """In bf16-mixed autograd keeps activations only: no cast weights from forward to backward. Angles are fp32."""
    hardware = Hardware.resolve(accelerator="cpu", precision="bf16-mixed")
    net = shard(build_gpt("cope_rope", n_layer=4, n_kv_head=4), mesh, hardware).train()
    assert not any(isinstance(p, DTensor) for pe in net.distinct_encodings for p in pe.parameters())
    kept, angles, idx = [], [], torch.arange(8).view(1, 8)
    net.blocks[1].attn.register_forward_pre_hook(lambda module, inputs: angles.extend(inputs[2].tables))

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with hardware.autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = net(idx, targets=idx)
    storages = {t.untyped_storage().data_ptr(): t for t in kept if t.dtype == torch.bfloat16}
    weights = {tuple(p.shape) for block in net.blocks for p in block.parameters() if p.ndim == 2 and min(p.shape) >= 64}
    shapes = weights | {shape[::-1] for shape in weights}
    alive = sum(t.untyped_storage().nbytes() for t in storages.values() if tuple(t.shape) in shapes)
    assert alive == 0
    assert [angle.dtype for angle in angles] == [torch.float32] * 2
    loss.backward()
    assert all(isinstance(p.grad, DTensor) for p in net.blocks[0].attn.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_sharded_network_is_the_network(mesh, checkpointing):
    """With documents, hidden states for an evaluation, loss and gradients."""
    net, whole = (build_gpt("cope_rope", n_layer=4, n_kv_head=4) for _ in range(2))
    shard(net, mesh, Hardware.resolve(accelerator="cpu", precision=32)).train()
    net.checkpointing = checkpointing
    idx = torch.arange(12).view(2, 6)
    documents = find_documents(idx, 8)
    with torch.no_grad(), evaluating(net):  # before the first step, too
        torch.testing.assert_close(net.head(net.hidden_states(idx)), whole.head(whole.hidden_states(idx)))
    net(idx, targets=idx, documents=documents).backward()
    whole(idx, targets=idx, documents=documents).backward()
    for (name, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(p.grad), q.grad, msg=name)


@pytest.mark.parametrize(("n", "step", "world"), [(7, 2, 2), (1, 4, 3), (8, 2, 4), (0, 2, 2)])
def test_ranks_share_the_batches_equally(monkeypatch, n, step, world):
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(distributed.shared_batches(n, step))
    assert len({len(share) for share in shares}) == 1
    assert sorted(start for share in shares for start in share if start is not None) == list(range(0, n, step))
