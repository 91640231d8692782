"""Continue a prompt with a trained model, token by token, through a KV cache.
A scaled encoding uses its scale if the text will be longer than the model was trained for.

python scripts/sample.py run=runs/rope-code prompt="'def main('" max_new_tokens=200 temperature=0.8 top_p=0.95 seed=1
python scripts/sample.py run=runs/rope-code pe=rerope max_new_tokens=2000
"""

import sys
import time
from typing import Any

from pydantic import Field

import ropewalk
from conf.cli import program
from conf.init_from import chosen_reader, opened
from conf.schema import Count, Section
from model import serialization
from model.generation import generate
from training.hardware import Hardware


class Arguments(Section):
    run: str
    pe: dict[str, Any] | None = None
    prompt: str
    max_new_tokens: Count
    temperature: float = Field(ge=0)
    top_k: Count | None
    top_p: float | None = Field(gt=0, le=1)
    seed: int = Field(ge=0, lt=2**63)
    device: str


@program("sample", Arguments)
def main(args: Arguments) -> None:
    path = opened(args.run)
    pe = chosen_reader(serialization.describe(path), args.pe)
    model = ropewalk.load(path, pe=pe, device=Hardware.resolve(accelerator=args.device, precision=32).device)
    net, decode, tokens = model.net, model.data.decode, model.encode(args.prompt)
    scale, written = net.scale_for(len(tokens) + args.max_new_tokens), tokens.tolist()
    options = args.model_dump(include={"temperature", "top_k", "top_p", "seed"})
    start, shown = time.perf_counter(), len(decode(written))
    with net.at_scale(scale):
        new = generate(net, tokens[None], args.max_new_tokens, **options)
        print(args.prompt, end="", flush=True)
        for token in new:
            written.append(int(token))
            text = decode(written)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else wait for the rest of a character
                print(text[shown:], end="", flush=True)
                shown = len(text)
        print(decode(written)[shown:], end="")
    speed = args.max_new_tokens / (time.perf_counter() - start)
    print(f"\n({args.max_new_tokens} tokens, {speed:.1f} tokens/s, scale {scale:g})", file=sys.stderr)


if __name__ == "__main__":
    main()
