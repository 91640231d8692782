"""What is set up on a CPU before anything is computed."""

import ast
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import build_gpt
from triton.compiler.errors import CompilationError
from triton.runtime.errors import PTXASError

from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check
from ropewalk.training import distributed, hardware


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
    """Here of the CPU, in place of a GPU: as many operations a second as it computes, within a factor of a few."""
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, device, dtype: randn(*size))
    timers = []
    times = iter([1.0, 2.0, 3.0, 2.0, 2.0])

    class FakeTimer:
        def __init__(self, code, globals):
            timers.append(globals["a"].shape)

        def timeit(self, n):
            return SimpleNamespace(median=next(times) if n == 5 else 99.0)

    monkeypatch.setattr("torch.utils.benchmark.Timer", FakeTimer)
    assert hardware.measured_flops("cuda", size=10) == 2 * 10**3 / 2.0
    assert timers == [(10, 10)]
    assert hardware.measured_flops("cpu") is None


def test_auto_is_resolved(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    found = hardware.Hardware.resolve(accelerator="cpu", precision="auto", compile="auto")
    assert (found.precision, found.compile) == ("32-true", False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"accelerator mps is not available here; choose auto or: .*cpu"):
        hardware.Hardware.resolve(accelerator="mps", precision="auto")


def resolved(kernels):
    return hardware.Hardware.resolve(accelerator="cuda", precision=32, kernels=kernels).kernels


def exact_kernels(monkeypatch, name):
    """A stand-in for the module `name` of kernels, exact on a stand-in for a GPU."""
    module = SimpleNamespace(EXACT=("row",), errors=lambda device, dtype: {"out": 1e-6, "row": 1e-6})
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    hardware.kernel_problem.cache_clear()
    hardware._say_once.cache_clear()
    return module


def test_kernels_of_one_encoding_are_checked_for_it_alone(monkeypatch, capsys):
    """Where those of CoPE are wrong, networks without it keep the others."""
    exact_kernels(monkeypatch, "lab.kernels.flash")
    module = exact_kernels(monkeypatch, "lab.kernels.cope")
    gpu = hardware.Hardware("cuda", "bf16-mixed", compile=False, kernels=True)
    names = ("rope", "cope")
    nets = [build_gpt(name, n_layer=1) for name in names]

    def allowed(gpu):
        for net in nets:
            hardware.allow_kernels(net, gpu)
        return [net.kernels for net in nets]

    assert allowed(gpu) == [True, True]
    assert capsys.readouterr().err == ""
    module.errors = lambda device, dtype: {"out": 1e-3, "row": 1e-3}  # in 16 bit the output may be off by as much
    hardware.kernel_problem.cache_clear()
    assert allowed(gpu) == [True, False]
    assert allowed(gpu) == [True, False]
    line = "attention runs without the kernels of lab.kernels.cope, slowly: they are not exact here, row is off by"
    assert capsys.readouterr().err.count(line) == 1
    hardware._say_once.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert allowed(gpu) == [True, False]
    assert capsys.readouterr().err == ""
    assert allowed(hardware.Hardware("cuda", "bf16-mixed", compile=False)) == [False, False]
    hardware.kernel_problem.cache_clear()


def test_kernels_run_where_they_are_exact(monkeypatch, capsys):
    """Else a run goes without them and says so, or is refused if it asks for them."""
    module = exact_kernels(monkeypatch, "lab.kernels.flash")
    assert [resolved(kernels) for kernels in ("auto", True, False)] == [True, True, False]
    assert capsys.readouterr().err == ""

    def fail(device, dtype):
        raise RuntimeError("out of resource\nand more")

    for errors, reason in (
        (lambda device, dtype: {"out": 1e-6, "row": 0.01}, "not exact here, row is off by 1.0e-02"),
        (lambda device, dtype: {"out": float("nan")}, "not exact here, out is off by nan"),
        (fail, r"do not run here \(RuntimeError: out of resource ... and more\)"),
    ):
        module.errors = errors
        hardware.kernel_problem.cache_clear()
        hardware._say_once.cache_clear()
        assert not resolved("auto")
        assert re.search(f"without kernels, .*{reason}", capsys.readouterr().err)
        with pytest.raises(ValueError, match=f"trainer.kernels=true: .*{reason}"):
            resolved(True)
    hardware.kernel_problem.cache_clear()
    with pytest.raises(ValueError, match="they need CUDA, and the device is cpu; choose auto or false"):
        hardware.Hardware.resolve(accelerator="cpu", precision=32, kernels=True)
    assert not hardware.Hardware.resolve(accelerator="cpu", precision=32, kernels="auto").kernels


def test_ranks_use_kernels_alike(monkeypatch, capsys):
    """Rank zero says where they do not work."""
    gpu = hardware.Hardware("cuda", "bf16-mixed", compile=False, kernels=True)
    net = build_gpt("rope", n_layer=1)
    for ranks, lines in (([True, True], 0), ([True, False], 1)):
        monkeypatch.setattr(distributed, "gather", lambda own, ranks=ranks: [own, *ranks[1:]])
        distributed.allow_kernels_alike(net, gpu)
        assert net.kernels == all(ranks)
        assert capsys.readouterr().err.count("without kernels, slowly: they do not work on ranks 1\n") == lines
    distributed.allow_kernels_alike(net, replace(gpu, kernels=False))
    assert (net.kernels, capsys.readouterr().err) == (False, "")


def test_what_a_compiler_says_names_the_fault():
    """Triton prints code first, and of a call in a kernel the fault is in the cause."""
    code = "def product(x):\n    return dot(x, x)\n"
    line = ast.parse(code).body[0].body[0]
    failure = CompilationError(code, line, None)
    failure.__cause__ = CompilationError(code, line, "ranks must be >= 2")
    assert hardware.reason_of(failure) == "CompilationError: at 2:4: ... ranks must be >= 2"
    message = "`ptxas` failed with error code 255\n`ptxas` stderr:\nptxas fatal : too much\n\nRepro command: ptxas\n"
    failure = PTXASError(message)
    expected = "PTXASError: PTXAS error: `ptxas` failed with error code 255 ... ptxas fatal : too much"
    assert hardware.reason_of(failure) == expected
    assert hardware.reason_of(MemoryError()) == "MemoryError"


@pytest.mark.parametrize("options", [{}, {"mlp": "swiglu", "n_kv_head": 1}, {"n_layer": 8, "dim": 32}])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_estimate_of_memory_is_a_lower_bound(options, precision):
    """Of what autograd keeps; and a third of it or more."""
    net, idx, kept = build_gpt("nope", train_len=64, **options).train(), torch.arange(256).view(4, 64) % 50, {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    run = hardware.Hardware("cpu", precision, compile=False)
    with run.autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        net(idx, targets=idx)
    held = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)
    values = train_values("train_len=64", "trainer.batch_size=4", "trainer.devices=1")
    cfg, sizes = check(values), {"parameters": net.n_parameters()["total"], "vocab_size": net.vocab_size}
    cfg = cfg.model_copy(update={"model": net.cfg})
    needed = hardware.training_memory(cfg, precision, **sizes)
    assert held / 3 < needed["activations"] + needed["logits"] <= held
    checkpointing = cfg.trainer.model_copy(update={"checkpointing": True})
    cfg = cfg.model_copy(update={"trainer": checkpointing})
    assert hardware.training_memory(cfg, precision, **sizes)["activations"] < needed["activations"]


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
