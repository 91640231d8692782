"""Continue a prompt with a trained model, token by token, through a KV cache.

python scripts/sample.py run=runs/yarn-code prompt="def main(" max_new_tokens=200 temperature=0.8 top_p=0.95 seed=1

A scaled encoding reads at its scale if the text will be longer than the model was trained for.
"""

import sys
import time

import torch
from pydantic import Field

import conf.cli
import data as data_sources
from conf.rundir import check_identity, find, read_config
from conf.schema import Section, parse
from model import store
from model.machine import Machine


class Arguments(Section):
    run: str
    prompt: str
    max_new_tokens: int = Field(200, ge=1)
    temperature: float = Field(0.8, ge=0)  # 0: always the most probable token
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int = Field(0, ge=0)


def main(arguments: dict[str, str]) -> None:
    args = parse(Arguments, arguments, strings=True)
    path = find(args.run)
    net = store.load(path)
    data = data_sources.build(read_config(path)["data"])
    ids = data.encode(args.prompt)
    check_identity(path, data.tokenizer_identity())
    device = Machine.choose(accelerator="auto", precision=32).device
    net.to(device)
    prompt = torch.tensor([ids], dtype=torch.int64, device=device)
    total = len(ids) + args.max_new_tokens
    print(args.prompt, end="", flush=True)
    start, written, shown = time.perf_counter(), list(ids), len(data.decode(ids))
    with net.reading(lambda pe: pe.reading_for(total)) as pe:
        options = args.model_dump(exclude={"run", "prompt", "max_new_tokens"})
        for token in net.generate(prompt, args.max_new_tokens, **options):
            written.append(int(token))
            text = data.decode(written)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else wait for the rest of a character
                print(text[shown:], end="", flush=True)
                shown = len(text)
        print(data.decode(written)[shown:], end="")
    speed = args.max_new_tokens / (time.perf_counter() - start)
    print(f"\n({args.max_new_tokens} tokens, {speed:.1f} tokens/s, {pe.label})", file=sys.stderr)


if __name__ == "__main__":
    conf.cli.script(main)
