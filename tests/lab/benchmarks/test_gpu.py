"""scripts/check_gpu.py reports what is wrong, what fails and what it left out. No test looks at a time."""

import re
from types import SimpleNamespace

import pytest
import torch
from small_options import SmallOptions, compile_without_code

from lab.benchmarks import gpu, targets
from lab.benchmarks.attention import largest_difference
from lab.benchmarks.targets import Comparison
from scripts import check_gpu


@pytest.fixture
def options(tmp_path):
    return SmallOptions(tmp_path)


@pytest.fixture
def small(options):
    """A command line that takes seconds."""
    return [*options.overrides, "model=tiny", "lengths=[16]", "nanogpt=null", "minutes=1e6"]


@pytest.fixture
def quick(monkeypatch):
    """Every check is right, and every measurement the same, without running."""
    row = {"forward": "2 (1 to 3)", "both": "2 (1 to 3)", "compiled": "1.1 (1 to 2)", "MB": "4.0"}
    step = {"graphs": "1", "tokens/s": "5", "share": "0.40", "of a product's TFLOP/s": "1", "peak memory, MB": "2"}
    monkeypatch.setattr(check_gpu, "exactness", lambda *args, **options: {"right": "yes"})
    monkeypatch.setattr(gpu.attention, "measured", lambda *args: row)
    monkeypatch.setattr(check_gpu, "speed", lambda *args, **options: step)
    monkeypatch.setattr(check_gpu, "profile", lambda options: "a profile")
    return monkeypatch


def last_line(out):
    return out.strip().splitlines()[-1]


def test_a_gpu_is_checked(small, script, monkeypatch):
    """On a CPU, without code generation, and as if it had no fused kernel for grouped heads in fp32."""
    compile_without_code(monkeypatch)
    monkeypatch.setattr(check_gpu, "LONG", 320)  # seconds less
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def fused(q, *args, **kwargs):
        if kwargs["enable_gqa"] and q.dtype == torch.float32:
            raise RuntimeError("No viable backend\nof many")
        return sdpa(q, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    code, out, err = script(check_gpu, *small, "encodings=[rope,t5]")
    torch._dynamo.reset()
    assert code == 1, err
    lines = out.splitlines()
    checks = {}
    for line in lines:
        if "(CPU " in line:
            name = line.split(" | ")[0].removeprefix("| ")
            checks[name] = line
    special = ["gpt_oss, sinks", "t5, sinks", "rope, documents", "kerple, documents", "cope, documents"]
    special += ["fire, documents", "relative, documents"]
    special += ["cope, 320 tokens", "stick_breaking, 320 tokens", "path, 320 tokens"]
    assert list(checks) == ["rope", "t5", *special]
    right = [name for name, line in checks.items() if line.endswith("| yes |")]
    assert right == ["t5", "t5, sinks", *special[3:]]
    assert checks["rope"].endswith("| fails: RuntimeError: No viable backend ... of many | **no** |")
    graphs = {}
    for line in lines:
        if line.startswith(("| eager", "| compiled")):
            name, number, *_ = line.split(" | ")
            graphs[name] = number
    # One of the blocks, one of the loss.
    assert graphs == {"| compiled": "2", "| eager": "0", "| compiled, checkpointing": "2"}
    assert "Self CPU" in out  # the profile
    assert "Left out" not in out
    # Batches of 16 and 1.
    assert out.count("\n|  | forward | both | compiled | off by | MB | target |") == 1
    assert out.count("\n|  | forward | both | MB |\n") == 1
    assert out.count("| SDPA at 16 tokens |") == 2
    assert "## Verdict, without kernels" in out
    wrong = "not exact: rope; gpt_oss, sinks; rope, documents"
    # Speed and memory of rope, t5, the window and sinks; and training.
    assert re.match(rf"{wrong}; \d of 9 targets met", last_line(out))


@pytest.mark.parametrize(
    ("spec", "parameter"),
    [("t5", "positions.0.table"), ("fire", "positions.0.c"), ("relative", "blocks.1.position.distances")],
)
def test_a_gradient_that_is_lost_in_bf16_is_not_exact(options, monkeypatch, spec, parameter):
    """However few numbers it has, beside those of all weights."""
    gradients = gpu.gradients
    on_cpu = {}

    def lost(net, hardware, length):
        """Those of the CPU serve as those of the device too, but for one."""
        key = hardware.precision
        if key in on_cpu:
            return on_cpu[key]
        on_cpu[key] = gradients(net, hardware, length)
        if key != "bf16-mixed":
            return on_cpu[key]
        assert parameter in on_cpu[key]
        return on_cpu[key] | {parameter: torch.zeros_like(on_cpu[key][parameter])}

    monkeypatch.setattr(gpu, "gradients", lost)
    row = gpu.exactness(options(), spec)
    assert row["bf16-mixed"].startswith("1.0e+00 (CPU ")
    assert row["bf16-mixed"].endswith(f", {parameter}")
    assert row["right"] == "**no**"
    monkeypatch.setattr(gpu, "gradients", lambda net, hardware, length: on_cpu[hardware.precision])
    assert gpu.exactness(options(), spec)["right"] == "yes"


def test_on_a_cpu_it_says_that_no_kernel_ran(small, script, quick):
    code, out, _ = script(check_gpu, *small, "encodings=[rope]")
    assert code == 0
    assert out.count("**No kernel runs here**: they need CUDA, and the device is cpu. So no kernel is checked.") == 2
    # Time of rope, the window and sinks, memory of these three, and the share.
    assert last_line(out) == "all 11 checks are exact; 5 of 7 targets met, missed: " + (
        "nope, window of T/8 at 16 tokens (1.1, target 0.6); nope, sinks at 16 tokens (1.1, target 1.05)"
    )


def test_a_gpu_that_is_expected_and_not_there_is_an_error(small, script, quick):
    code, _, err = script(check_gpu, *small, "device=auto")
    assert (code, "device=cpu checks the rest" in err, "Traceback" in err) == (2, True, False)


def test_kernels_that_a_gpu_should_have_and_that_do_not_work_are_a_failure(small, script, quick):
    def on_cuda(options):
        return options.model_copy(update={"device": "cuda", "kernels": False})

    quick.setattr(check_gpu, "resolved_device", on_cuda)
    quick.setattr(check_gpu, "attention_jobs", lambda options: {})
    quick.setattr(check_gpu, "on_this_machine", lambda options: "")
    quick.setattr(check_gpu, "kernel_problem", lambda device, dtype: "off by 1e-1")
    quick.setattr(check_gpu, "configuration", lambda *args: None)
    code, out, _ = script(check_gpu, *small, "device=auto", "encodings=[rope]")
    assert "all 11 checks are exact" in last_line(out)
    assert (code, "**No kernel runs here**: off by 1e-1." in out) == (1, True)
    code, out, _ = script(check_gpu, *small, "device=auto", "encodings=[rope]", "kernels=false")
    assert (code, "**No kernel runs here**: kernels=false." in out) == (0, True)


def test_a_check_that_is_out_of_time_names_what_it_left_out(small, script):
    """Every part keeps the time, and a run that checked nothing is no success."""
    code, out, _ = script(check_gpu, *small, "encodings=[rope]", "batch=2", "minutes=1e-9", "kernels=false")
    assert code == 1
    layers = "SDPA at 16 tokens; rope at 16 tokens; nope, window of T/8 at 16 tokens; nope, sinks at 16 tokens"
    lines = out.split("Left out after 1e-09 minutes:\n\n")[1].splitlines()
    assert lines[0].startswith("- Exactness: rope; gpt_oss, sinks; t5, sinks; rope, documents;")
    assert lines[1:6] == [
        "- Training, bf16-mixed, beside the speed of one large product: compiled; eager; compiled, checkpointing",
        f"- Attention, batch 2: {layers}",
        "- Profile of two training steps",
        f"- Attention, batch 1: {layers}",
        "",
    ]
    assert last_line(out) == "**nothing was checked**; no target was measured"


def test_what_fails_is_a_row_and_the_rest_goes_on(small, script, quick):
    def fails(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def measured(options, name, *args):
        if name == "rope":
            fails()
        return {"forward": "1", "both": "1", "compiled": "1", "MB": "4"}

    def exactness(options, spec, **kind):
        if kind.get("documents"):
            fails()
        return {"right": "yes"}

    quick.setattr(check_gpu, "exactness", exactness)
    quick.setattr(gpu.attention, "measured", measured)
    quick.setattr(check_gpu, "speed", fails)
    code, out, _ = script(check_gpu, *small, "encodings=[rope]")
    assert code == 1
    assert "| rope, documents | fails: OutOfMemoryError: CUDA out of memory |  |  |" in out
    assert "| rope at 16 tokens | fails: OutOfMemoryError: CUDA out of memory |" in out
    assert out.count("| nope, sinks at 16 tokens | 1 | 1 |") == 2
    assert "a profile" in out
    verdict = last_line(out)
    assert verdict.startswith("**only 6 of 11 checks ran**, and are exact; **failed**: Exactness: rope, documents;")
    assert "; Exactness: kerple, documents;" in verdict
    assert "compiled, checkpointing; Attention, batch 16: rope at 16 tokens; Attention, batch 1" in verdict


def test_a_compiled_layer_that_computes_something_else_is_not_exact(small, script, quick):
    def measured(options, name, *args):
        cells = {"forward": "1", "both": "1", "compiled": "1", "MB": "4"}
        return cells | {"off by": "3.0e-02" if name == "rope" else "3.0e-03"} if options.compiled else cells

    quick.setattr(gpu.attention, "measured", measured)
    code, out, _ = script(check_gpu, *small, "encodings=[rope]", "dtype=bfloat16")
    assert code == 1
    assert last_line(out).startswith("not exact: rope at 16 tokens; ")
    assert "| rope at 16 tokens | 1 | 1 | 1 | 3.0e-02 | 4 | 1.15 |" in out


def test_the_largest_difference_is_that_of_a_gradient_with_many_numbers():
    large = torch.ones(1000)
    few = torch.ones(2)
    assert largest_difference([large, None, few], [large * 1.25, None, few * 2]) == 0.25
    assert largest_difference([large], [large * float("nan")]) == float("inf")


def test_a_mistake_ends_the_check_before_it_begins(small, script):
    code, out, err = script(check_gpu, *small, "encodings=[rope,rop]")
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert "rop" in err


def test_what_has_targets_comes_first(options):
    names = list(check_gpu.exactness_jobs(options("encodings=null")))
    first = [name for name in names if name in targets.TARGETS or name in targets.FORWARD_TARGETS]
    assert names[: len(first)] == first
    assert names[len(first)] == "gpt_oss, sinks"
    assert names[len(first) + 9] == f"path, {gpu.LONG} tokens"
    assert "yarn" in names[len(first) + 10 :]
    assert len(names) == len(set(names)) == len(check_gpu.encoding_names()) + 10

    rows = list(gpu.attention_jobs(options("encodings=[yarn,rope,dca]", "lengths=[16,32]")))
    assert [name.removesuffix(" at 16 tokens") for name in rows[:6]] == [
        "SDPA", "rope", "dca", "nope, window of T/8", "nope, sinks", "yarn",
    ]  # fmt: skip
    assert rows[7] == "rope at 32 tokens"


@pytest.mark.parametrize(
    ("difference", "noise", "right"),
    [
        (1e-5, 1e-6, "yes"),
        (1e-4, 1e-6, "**no**"),
        (float("nan"), 1e-6, "**no**"),
        (9e-5, 2e-5, "yes"),
        (1e-5, 4e-5, "**too noisy to tell**"),
    ],
)
def test_training_with_kernels_is_compared_with_training_without(options, monkeypatch, difference, noise, right):
    """By the largest difference in any step, beside that of other initial weights."""

    class Job:
        def __init__(self, cfg):
            self.cfg = cfg
            self.net = torch.nn.Linear(2, 1)
            self.net.weight.data.fill_(1.0)
            self.net.kernels = cfg.trainer.kernels

    def steps_of(job):
        trainer = job.cfg.trainer
        assert (trainer.compile, job.cfg.model.n_layer, trainer.precision) == (False, 2, "32-true")
        change = (job.net.weight - 1).abs().max().item()
        assert not (trainer.kernels and change)
        added = difference if trainer.kernels else noise * bool(change)
        assert change == 0 or gpu.NOISE / 2 < change < 2 * gpu.NOISE
        yield torch.tensor(9.0 + added, dtype=torch.float64)
        while True:
            yield torch.tensor(2.0, dtype=torch.float64)

    monkeypatch.setattr(gpu, "steps_of", steps_of)
    monkeypatch.setattr(gpu, "Job", Job)
    row = gpu.agreement(options(), "kerple")
    assert list(row) == gpu.AGREEMENT_COLUMNS
    assert list(row.values()) == ["2.0000", "2.0000", f"{difference:.1e}", f"{noise:.1e}", right]


def test_training_that_does_not_use_its_kernels_does_not_agree(options, monkeypatch):
    monkeypatch.setattr(gpu, "Job", lambda cfg: SimpleNamespace(net=SimpleNamespace(kernels=False)))
    with pytest.raises(RuntimeError, match="without kernels"):
        gpu.agreement(options(), "kerple")


def attention_row(name, tokens, **cells):
    return {"": f"{name} at {tokens} tokens", "name": name, "tokens": tokens} | cells


def test_the_verdict_names_what_is_wrong_and_what_is_slow():
    rows = [
        attention_row("SDPA", "16", forward="3 ms", compiled="9 ms", MB="4.0"),
        attention_row("rope", "16", forward="1", compiled="1.15 (1.1 to 1.2)", MB="8.1"),
        attention_row("rope", "32", forward="1", compiled="1.2 (1.1 to 1.3)", MB="99"),  # no SDPA at this length
        attention_row("dca", "16", forward="2.5 (2.0 to 2.8)", compiled="9 (8 to 10)", MB="50"),
        attention_row("path", "16", forward="9", compiled="4", MB="44"),
        attention_row("yarn", "16", forward="9", compiled="9", MB="44"),
    ]
    steps = [{"": "eager", "share": "0.2"}, {"": "compiled", "share": "0.37"}]
    comparisons = targets.attention_comparisons(rows) + targets.share_comparisons(steps)
    missed = "memory of rope at 16 tokens (2.02, target 2); rope at 32 tokens (1.2, target 1.15)"
    missed += "; dca at 16 tokens, forward (2.5, target 2); share of a large product in training (0.37, target 0.38)"
    checks = [{"": "rope", "right": "yes"}]
    message = targets.verdict(checks, 1, [], comparisons)
    assert message == f"all 1 checks are exact; 3 of 7 targets met, missed: {missed}"
    message = targets.verdict([*checks, {"": "t5", "right": "**no**"}], 2, ["Profile"], [Comparison("a", 1, 1)])
    assert message == "not exact: t5; **failed**: Profile; 1 of 1 targets met"
    assert targets.verdict([], 5, [], []) == "**nothing was checked**; no target was measured"
