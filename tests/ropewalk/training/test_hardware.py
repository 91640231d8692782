"""What is set up on a CPU before anything is computed."""

from types import SimpleNamespace

import pytest
import torch
from conftest import build_gpt

from model.size import n_parameters
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check
from ropewalk.training import hardware


def test_determinism_is_asked_of_pytorch_and_cublas(monkeypatch):
    """For one run of a sweep, not for those after it."""
    monkeypatch.setattr(hardware.os, "environ", {})
    hardware.tune("cuda", deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert hardware.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    hardware.tune("cuda")
    assert not torch.are_deterministic_algorithms_enabled()


def test_products_of_matrices_keep_the_precision_of_fp32():
    hardware.tune("cpu")
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_peak_of_a_gpu_is_that_of_a_product_of_matrices(monkeypatch):
    """In operations a second: a product of two matrices [10, 10] that takes two seconds."""
    times = iter([99.0, 1.0, 2.0, 3.0, 2.0, 2.0])
    timer = SimpleNamespace(timeit=lambda n: SimpleNamespace(median=next(times)))
    monkeypatch.setattr("torch.utils.benchmark.Timer", lambda code, globals: timer)
    assert hardware.product_flops("cpu", 10) == 2 * 10**3 / 2.0
    assert hardware.measured_flops("cpu") is None


def test_auto_is_resolved(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    found = hardware.Hardware.resolve(accelerator="cpu", precision="auto", compile="auto")
    assert (found.precision, found.compile) == ("32-true", False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"accelerator mps is not available here; choose auto or: .*cpu"):
        hardware.Hardware.resolve(accelerator="mps", precision="auto")


@pytest.mark.parametrize(
    ("device", "capability", "precision", "problem"),
    [
        ("cuda", (9, 0), "bf16-mixed", ""),
        ("cuda", (7, 5), "bf16-mixed", "capability"),
        ("cuda", (9, 0), "32-true", "16 bit"),
        ("cpu", (9, 0), "bf16-mixed", "CUDA"),
    ],
)
def test_kernels_need_a_gpu_and_16_bit(monkeypatch, device, capability, precision, problem):
    """Asked for they are an error elsewhere; by "auto" they are left out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    options = dict(accelerator=device, precision=precision)
    assert hardware.Hardware.resolve(**options, kernels="auto").kernels == (not problem)
    if problem:
        with pytest.raises(ValueError, match=f"trainer.kernels=true: .*{problem}"):
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
    monkeypatch.setattr(hardware, "CONTROL_GROUPS", tmp_path)
    whole = hardware.memory_limit()
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.memory_limit() == whole
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    assert hardware.memory_limit() == 2**30
    monkeypatch.setattr(hardware.resource, "getrlimit", lambda kind: (2**29, 2**29))
    assert hardware.memory_limit() == 2**29
