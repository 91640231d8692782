"""Continue a prompt with a trained model, token by token, through a KV cache.

python scripts/sample.py run=runs/rope-code prompt="'def main('" max_new_tokens=200 temperature=0.8 top_p=0.95 seed=1

A scaled encoding uses its scale if the text will be longer than the model was trained for.
"""

import sys
import time

import hydra
import torch
from omegaconf import DictConfig
from pydantic import Field

import data as data_sources
from conf.cli import friendly_errors, plain
from conf.run_dir import check_identity, data_options, find
from conf.schema import Count, Section, parse
from model import serialization
from model.generation import generate
from training.hardware import Hardware


class Arguments(Section):
    run: str
    prompt: str
    max_new_tokens: Count
    temperature: float = Field(ge=0)
    top_k: Count | None
    top_p: float | None = Field(gt=0, le=1)
    seed: int = Field(ge=0, lt=2**63)
    device: str


@friendly_errors
@hydra.main(version_base="1.3", config_path="../conf", config_name="sample")
def main(composed: DictConfig) -> None:
    args = parse(Arguments, plain(composed))
    path = find(args.run)
    data = data_sources.build(data_options(path, "prepared"))
    check_identity(path, data.tokenizer_identity())
    ids = data.encode(args.prompt)
    device = Hardware.resolve(accelerator=args.device, precision=32).device
    net = serialization.load(path).to(device)
    tokens = torch.tensor([ids], dtype=torch.int64, device=device)
    scale = net.scale_for(len(ids) + args.max_new_tokens)
    options = args.model_dump(include={"temperature", "top_k", "top_p", "seed"})
    start, written, shown = time.perf_counter(), list(ids), len(data.decode(ids))
    with net.at_scale(scale):
        new = generate(net, tokens, args.max_new_tokens, **options)
        print(args.prompt, end="", flush=True)
        for token in new:
            written.append(int(token))
            text = data.decode(written)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else wait for the rest of a character
                print(text[shown:], end="", flush=True)
                shown = len(text)
        print(data.decode(written)[shown:], end="")
    speed = args.max_new_tokens / (time.perf_counter() - start)
    print(f"\n({args.max_new_tokens} tokens, {speed:.1f} tokens/s, scale {scale:g})", file=sys.stderr)


if __name__ == "__main__":
    main()
