"""Continue a prompt with a trained model, token by token, with a KV cache.

A scaled encoding uses its scale if the text will be longer than the training length.

python scripts/sample.py run=runs/rope-code prompt="'def main('" max_new_tokens=200 temperature=0.8 top_k=40 seed=1
python scripts/sample.py run=runs/rope-code prompt=@notes.txt       # a file; prompt=- reads what is piped in
python scripts/sample.py run=runs/rope-code pe=rerope max_new_tokens=2000
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.sample")

import itertools
import sys
from pathlib import Path
from typing import Any

from pydantic import Field

from conf.files import printable, read_text
from conf.schema import Count, Section
from model.position.network import for_length
from ropewalk import Model
from ropewalk.app.configure import chosen_variant
from ropewalk.app.init_from import opened
from ropewalk.training.hardware import Hardware


class Arguments(Section):
    run: str
    step: Count | None
    pe: dict[str, Any] | None = None
    prompt: str
    max_new_tokens: Count
    temperature: float = Field(ge=0)
    top_k: Count | None
    seed: int = Field(ge=0, lt=2**63)
    device: str


def main(args: Arguments) -> None:
    trained = opened(args.run, step=args.step)
    prompt = args.prompt
    if prompt == "-":
        prompt = sys.stdin.read()
    elif prompt.startswith("@"):
        prompt = read_text(Path(prompt[1:]))
    pe = chosen_variant(trained.description, args.pe) if args.pe else None
    hardware = Hardware.resolve(accelerator=args.device, precision="32-true")
    model = Model(trained.network(pe).to(hardware.device), trained.data)
    tokens = len(model.encode(prompt)) + args.max_new_tokens
    encodings = for_length(model.net.encodings, tokens)  # those that `stream` reads with too
    scale = max(encoding.active_scale for encoding in encodings)  # 1 in layers that are not scaled
    # A scale extends the length that the weights were first trained at.
    scaled = [getattr(encoding, "original_len", 0) * encoding.active_scale for encoding in encodings]
    readable = max(model.net.train_len, *scaled)
    if tokens > readable:
        print(f"warning: {tokens} tokens, but the model was trained to read {readable:g}", file=sys.stderr)
    options = args.model_dump(include={"max_new_tokens", "temperature", "top_k", "seed"})
    for piece in itertools.chain([prompt], model.stream(prompt, **options)):
        # First the prompt, then what follows it. A terminal would obey control characters.
        print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    print(f"\n({args.max_new_tokens} tokens, scale {scale:g})", file=sys.stderr)
