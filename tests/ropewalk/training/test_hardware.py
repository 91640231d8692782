"""What is set up on a CPU before anything is computed."""

import pytest
import torch
from conftest import build_gpt

from model.size import n_parameters
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check
from ropewalk.training import hardware
from ropewalk.training.hardware import Hardware


def test_determinism_is_asked_of_pytorch_for_one_run_of_a_sweep():
    hardware.tune("cuda", deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()

    hardware.tune("cuda")
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_is_asked_for_and_cannot_be_had_is_an_error():
    """And "auto" takes what there is."""
    with pytest.raises(ValueError, match=r"accelerator cuda is not available here; choose auto or: .*cpu"):
        Hardware.resolve(accelerator="cuda", precision="auto")

    options = dict(accelerator="cpu", precision="bf16-mixed")
    assert not Hardware.resolve(**options, kernels="auto").kernels
    with pytest.raises(ValueError, match=r"trainer\.kernels=true: they need CUDA, and the device is cpu; choose auto"):
        Hardware.resolve(**options, kernels=True)


def activations_of(net, run):
    """Bytes that autograd keeps for the backward pass of a batch of 16 x 256 tokens, beside the parameters."""
    sizes = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    idx = torch.arange(4096).view(16, 256) % 16
    with run.autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(idx, targets=idx)
    for p in net.parameters():
        sizes.pop(p.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


@pytest.mark.parametrize("options", [{}, {"mlp": "swiglu", "n_kv_head": 1}, {"n_layer": 8, "dim": 32}])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_estimate_of_memory_is_a_lower_bound(monkeypatch, options, precision, checkpointing):
    """Of what AdamW and autograd keep, and a quarter of it or more; a limit below it is an error, one above is none."""
    net = build_gpt("nope", vocab_size=16, train_len=256, checkpointing=checkpointing, **options).train()
    run = Hardware("cpu", precision, compile=False)
    parameters = n_parameters(net)["total"]
    taken = 12 * parameters + max(4 * parameters, activations_of(net, run))
    sizes = ["train_len=256", "trainer.batch_size=16", "trainer.devices=1", f"trainer.checkpointing={checkpointing}"]
    cfg = check(train_values(*sizes)).model_copy(update={"model": net.cfg})

    monkeypatch.setattr(hardware, "memory_limit", lambda: taken)
    hardware.check_memory(cfg, run, parameters=parameters)
    monkeypatch.setattr(hardware, "memory_limit", lambda: taken // 4)

    with pytest.raises(ValueError, match="not enough memory"):
        hardware.check_memory(cfg, run, parameters=parameters)


def test_the_limit_of_a_container_or_of_the_shell_is_known(monkeypatch, tmp_path):
    """A control group's and RLIMIT_AS count where they are below the machine's memory."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(hardware, "CONTAINER_LIMIT", limit)
    limit.write_text("max\n")

    assert hardware.memory_limit() > 2**30

    limit.write_text(f"{2**30}\n")
    assert hardware.memory_limit() == 2**30

    monkeypatch.setattr(hardware.resource, "getrlimit", lambda kind: (2**29, 2**29))
    assert hardware.memory_limit() == 2**29
