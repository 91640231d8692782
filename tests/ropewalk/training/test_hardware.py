"""What is set up on a CPU before anything is computed."""

import pytest
import torch
from conftest import build_gpt

from model.size import n_parameters
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check
from ropewalk.training import hardware


def test_determinism_is_asked_of_pytorch_for_one_run_of_a_sweep():
    hardware.tune("cuda", deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    hardware.tune("cuda")
    assert not torch.are_deterministic_algorithms_enabled()


def test_auto_is_resolved(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    found = hardware.Hardware.resolve(accelerator="cpu", precision="auto", compile="auto")
    assert (found.precision, found.compile) == ("32-true", False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"accelerator mps is not available here; choose auto or: .*cpu"):
        hardware.Hardware.resolve(accelerator="mps", precision="auto")


def test_kernels_that_are_asked_for_and_cannot_be_had_are_an_error():
    options = dict(accelerator="cpu", precision="bf16-mixed")
    assert not hardware.Hardware.resolve(**options, kernels="auto").kernels
    with pytest.raises(ValueError, match=r"trainer\.kernels=true: they need CUDA, and the device is cpu; choose auto"):
        hardware.Hardware.resolve(**options, kernels=True)


@pytest.mark.parametrize("options", [{}, {"mlp": "swiglu", "n_kv_head": 1}, {"n_layer": 8, "dim": 32}])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_estimate_of_memory_is_a_lower_bound(monkeypatch, options, precision, checkpointing):
    """Of what AdamW and autograd keep, and a quarter of it or more; a limit below it is an error, one above is none."""
    net = build_gpt("nope", vocab_size=16, train_len=256, **options).train()
    net.checkpointing = checkpointing
    idx = torch.arange(4096).view(16, 256) % 16
    kept = {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    run = hardware.Hardware("cpu", precision, compile=False)
    with run.autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        net(idx, targets=idx)
    activations = sum(size for address, size in kept.items() if address not in own)
    parameters = n_parameters(net)["total"]
    taken = 12 * parameters + max(4 * parameters, activations)
    sizes = "train_len=256", "trainer.batch_size=16", "trainer.devices=1", f"trainer.checkpointing={checkpointing}"
    cfg = check(train_values(*sizes)).model_copy(update={"model": net.cfg})
    for limit, is_enough in ((taken / 4, False), (taken, True)):
        monkeypatch.setattr(hardware, "memory_limit", lambda limit=limit: int(limit))
        if is_enough:
            hardware.check_memory(cfg, run, parameters=parameters)
        else:
            with pytest.raises(ValueError, match="not enough memory"):
                hardware.check_memory(cfg, run, parameters=parameters)


def test_the_limit_of_a_container_or_of_the_shell_is_known(monkeypatch, tmp_path):
    """A control group's and RLIMIT_AS count where they are below the machine's memory."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(hardware, "CONTAINER_LIMIT", limit)
    whole = hardware.memory_limit()
    limit.write_text("max\n")
    assert hardware.memory_limit() == whole
    limit.write_text(f"{2**30}\n")
    assert hardware.memory_limit() == 2**30
    monkeypatch.setattr(hardware.resource, "getrlimit", lambda kind: (2**29, 2**29))
    assert hardware.memory_limit() == 2**29
