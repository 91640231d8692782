"""Check a GPU that nothing has run on yet: print Markdown on whether it is exact, how fast it is and what it holds.

The last line is the verdict. Exit code 1: an encoding fails, is less exact than on a CPU, or trains otherwise with
kernels than without.

python scripts/check_gpu.py > gpu.md
python scripts/check_gpu.py kernels=false "encodings=[kerple,fox]" > blocks.md                       # without kernels
python scripts/check_gpu.py device=cpu model=tiny train_len=64 "encodings=[rope,t5]" "lengths=[128]"   # runs anywhere
"""

import sys

from app.cli import encoding_names, program
from benchmarks import Options
from benchmarks.attention import attention
from benchmarks.gpu import LONG, TARGETS, TRAINED, agreement, exactness, profile, speed, verdict
from benchmarks.measure import markdown, on_this_machine, resolved_device
from benchmarks.training import peers


@program("check_gpu", Options)
def main(options: Options) -> None:
    options = resolved_device(options)
    print(f"{on_this_machine(options)}\n\n## Exactness\n")
    checks = []
    for spec in options.encodings or encoding_names():
        checks.append(exactness(options, spec))
    for spec in ("gpt_oss", "t5"):
        checks.append(exactness(options, spec, sinks=True))
    for spec in ("rope", "kerple", "cope"):
        checks.append(exactness(options, spec, documents=True))
    for spec in ("cope", "stick_breaking"):
        checks.append(exactness(options, spec, length=LONG))
    print(markdown(checks), flush=True)
    if options.kernels:
        trainings = [agreement(options, spec) for spec in ("gemma3", "kerple", "fox", "cope", "stick_breaking")]
        print(f"\n## Loss after {TRAINED} steps\n\n{markdown(trainings)}", flush=True)
        checks += trainings
    print("\n## Training, bf16-mixed, beside the speed of one large product\n", flush=True)
    steps = [
        speed(options, "eager", compile=False),
        speed(options, "compiled", compile=True),
        speed(options, "compiled, checkpointing", compile=True, checkpointing=True),
    ]
    print(f"{markdown(steps)}\n\n```\n{profile(options)}```", flush=True)
    for batch in dict.fromkeys((1, options.batch)):
        rows = attention(options.model_copy(update={"batch": batch}))
        for row in rows:
            row["compiled: target"] = str(TARGETS.get(row[""], ""))
        print(f"\n## Attention, batch {batch}\n\n{markdown(rows)}", flush=True)
    if options.nanogpt:
        print(f"\n## Beside nanoGPT\n\n{markdown(peers(options))}")
    kernels = "with" if options.kernels else "without"
    print(f"\n## Verdict, {kernels} kernels\n\n{verdict(checks, rows)}")
    sys.exit(any(row["right"] != "yes" for row in checks))


if __name__ == "__main__":
    main()
