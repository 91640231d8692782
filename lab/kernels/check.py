"""The check of kernels before they are used: twins against the encodings themselves, on inputs such as the run has.

It runs in a process of its own, with a time limit: a kernel may hang, or leave a device that nothing works on any more.
A verdict is kept for this GPU, these versions, these kernels and these encodings.

python -m lab.kernels.check FILE DEVICE     # what `checked` starts; FILE holds the encodings
"""

import copy
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from conf import files
from lab.kernels import cope, twins
from lab.kernels.in_place import InPlace
from model.layout import WHOLE
from model.position.base import PositionEncoding
from model.position.cope import CoPE
from model.position.layer import init_parameters
from model.position.network import view

LIMIT = 60.0  # seconds of a check
LENGTHS = (192, 150)  # Triton compiles a kernel once for lengths that 16 divides, and once for others
SINKS = 1.0  # standard deviation of the sinks
WINDOW = 100  # tokens of the longest window that is checked
END = 1  # the token that ends a document
# Beyond twice the error of the encoding in PyTorch: of what is rounded to 16 bit, and of what is summed in fp32.
ROUNDED = 5e-3
EXACT = 2e-4
# The gradient of FIRE's c is a sum over queries whose parts, through the distances and through the reach, cancel: in a
# test they are 27,000 times as large as the sum, so that half a rounding of fp32 is 2e-3 of it.
CANCELLED = {"c": 2e-3}
NEGLIGIBLE = 1e-6  # error, as a share of the norm of the largest gradient: 8 times the rounding of fp32


class Error(NamedTuple):
    """The relative error of one result, against float64, and the most that it may be."""

    value: float
    most: float

    @property
    def is_right(self) -> bool:
        return self.value <= self.most


def errors(
    pe: PositionEncoding,
    length: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    documents: bool = False,
    rounded: float = ROUNDED,
    exact: float = EXACT,
) -> dict[str, Error]:
    """The errors of the output, "out", and of the gradients of all inputs and parameters, on a device.

    There it is computed by the twin of `pe`, if it has one, of two texts and with a sink for each head.

    Args:
        length: tokens of a text.
        documents: the second text is four documents.
        rounded, exact: beyond twice the error of the encoding in PyTorch, of what is rounded to 16 bit or not.
    """
    inputs = _inputs(pe, length, dtype)
    expected = _results(copy.deepcopy(pe).double(), {name: x.double() for name, x in inputs.items()}, documents)
    on_cpu = _results(copy.deepcopy(pe), inputs, documents)
    twin = copy.deepcopy(pe).to(device)
    twin.__class__ = twins.twin_of(type(twin))  # type: ignore[arg-type]  # as `lab.kernels.install` does
    here = _results(twin, {name: x.to(device) for name, x in inputs.items()}, documents)
    assert expected.keys() == here.keys() == on_cpu.keys()
    largest = max(float(x.norm()) for x in expected.values())
    bias, _ = twins.bias_of(type(pe)) or ("none", None)
    # Kernels sum the gradients of biases and sinks in fp32; but a rotated query or key is rounded before.
    sums_are_rounded = bias in ("none", "cope") or type(pe).rotate is not PositionEncoding.rotate
    found = {}
    for name, x in expected.items():
        norm = max(float(x.norm()), NEGLIGIBLE * largest)
        of_pytorch = float((on_cpu[name].double() - x).norm()) / norm
        is_rounded = dtype.itemsize == 2 and (sums_are_rounded or here[name].element_size() == 2)
        value = float((here[name].double().cpu() - x).norm()) / norm
        # A gradient that is zero, but for rounding, has no relative error of its own: as one of a bias that all keys
        # have, or of a sink that outweighs them.
        beyond = rounded if is_rounded else CANCELLED.get(name, exact)
        most = 2 * of_pytorch + beyond + NEGLIGIBLE * largest / norm
        found[name] = Error(value, most)
    return found


def _inputs(pe: PositionEncoding, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random inputs of a layer's attention, and a gradient of its output."""
    generator = torch.Generator().manual_seed(0)
    kv = (2, length, pe.n_kv_head, pe.head_dim)
    heads = (2, length, pe.n_head, pe.head_dim)
    sizes = {"q": heads, "k": kv, "v": kv, "x": (2, length, pe.dim), "out_grad": heads}
    inputs = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    return inputs | {"sinks": SINKS * torch.randn(pe.n_head, generator=generator)}


def _results(pe: PositionEncoding, inputs: Mapping[str, Tensor], documents: bool) -> dict[str, Tensor]:
    """The output of attention, and the gradient of each input and parameter that it depends on."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if name != "out_grad"}
    x = leaves["x"]
    length = x.size(1)
    idx = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
    idx[1, length // 3 : length // 3 + 2] = END  # one token is a document
    idx[1, length // 2] = END
    layout = InPlace(END) if documents else WHOLE
    _, _, contexts = layout.contexts([pe], idx, None)
    with torch.autocast(x.device.type, x.dtype, enabled=x.element_size() == 2):
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        out = contexts[pe].attend(pe, q, k, v, pe.state(x), layer=0, sinks=leaves["sinks"])
    leaves |= dict(pe.named_parameters())
    grads = torch.autograd.grad(out, list(leaves.values()), inputs["out_grad"], allow_unused=True)
    named = zip(leaves, grads, strict=True)
    return {"out": out.detach()} | {name: grad for name, grad in named if grad is not None}


def problem_of(encodings: Sequence[PositionEncoding], dtype: torch.dtype, device: str) -> str:
    """Say which encoding is wrong, in this process; "" if none is."""
    for pe in encodings:
        # Kernels of CoPE take long texts in chunks.
        for length in (*LENGTHS, cope.CHUNK + 76) if isinstance(pe, CoPE) else LENGTHS:
            n = min(length, pe.max_len or length)
            for name, error in errors(pe, n, dtype, device, documents=twins.reads_in_place(pe)).items():
                if not error.is_right:
                    return f"{type(pe).__name__}: {name} is off by {error.value:.1e} in {n} tokens"
    return ""


def checked(encodings: Sequence[PositionEncoding], device: str, limit: float | None = None) -> str:
    """`problem_of` in 16 bit, of encodings like these with other parameters, in a process of its own.

    Args:
        device: cuda, of which the check takes the current one; or cpu, with Triton's interpreter.
        limit: seconds that it may take; by default `LIMIT`.
    """
    if not encodings:
        return ""
    alike = [view(small(pe), active_scale=scale) for pe in encodings for scale in pe.scales]
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "encodings.pt")
        torch.save(alike, file)
        verdict = _verdict(alike, file.read_bytes(), device)
        with suppress(OSError, ValueError):
            return str(json.loads(verdict.read_text())["problem"])
        command = [sys.executable, "-m", "lab.kernels.check", str(file), device]
        # One thread: a dozen checks at once, each with all threads, took ten times as long.
        printed = outcome_of(command, limit or LIMIT, CUDA_LAUNCH_BLOCKING="1", OMP_NUM_THREADS="1").splitlines()
    outcome = printed[-1] if printed else "printed nothing"
    if not outcome.startswith("{"):  # it did not end: next time it may
        return f"their check {outcome}"
    with suppress(OSError):
        verdict.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(verdict, outcome)
    return str(json.loads(outcome)["problem"])


def outcome_of(command: Sequence[str], limit: float, **environment: str) -> str:
    """What a program prints, in the end how it failed if it did; it is stopped after `limit` seconds."""
    # A user's own encodings are imported from where this process would import them.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        return f"{(late.stdout or b'').decode()}took more than {limit:.0f} seconds"
    if done.returncode == 0:
        return done.stdout.decode().strip()
    last = done.stderr.decode().strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return f"failed: {last[0]}"


def small(pe: PositionEncoding) -> PositionEncoding:
    """An encoding like `pe`, which may be on any device, with random parameters, and with a short window."""
    alike = copy.deepcopy(pe).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    init_parameters(alike, generator)
    with torch.no_grad():
        for p in alike.parameters():
            # Parameters that start at zero would hide errors.
            p.add_(torch.empty_like(p).normal_(0, 0.3, generator=generator))
    if alike.window is not None:
        alike.window = min(alike.window, WINDOW)
    return alike


def _verdict(encodings: Sequence[PositionEncoding], pickled: bytes, device: str) -> Path:
    """The file of the verdict on these encodings: of this device, these versions and this source."""
    sources = {Path(inspect.getfile(type(pe))) for pe in encodings}.union(Path(__file__).parent.glob("*.py"))
    key = hashlib.sha256(pickled)
    for path in sorted(sources):
        key.update(path.read_bytes())
    name = torch.cuda.get_device_properties(device) if device.startswith("cuda") else device
    key.update(f"{torch.__version__} {triton.__version__} {name}".encode())
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches, "ropewalk", "kernels", f"{key.hexdigest()[:32]}.json")


def main(file: str, device: str) -> None:
    """Print the problem of the encodings in a file as a line of JSON."""
    encodings = torch.load(file, weights_only=False)  # of the process that started this one
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    # Triton's interpreter does not know bf16.
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float16
    print(json.dumps({"problem": problem_of(encodings, dtype, device)}), flush=True)
    os._exit(0)  # CUDA's threads may abort a process that ends by itself, with the verdict printed


if __name__ == "__main__":
    main(*sys.argv[1:])
