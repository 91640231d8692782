"""Write a trained model, with its tokenizer, as a folder that transformers opens.

python scripts/export.py run=runs/rope-code out=rope-code-hf
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.export")

from functools import partial
from typing import Any

from pydantic import Field

from conf.schema import Count, Section
from data.text import TextData
from ropewalk.app.init_from import opened
from ropewalk.hf import export, tokenizers


class Arguments(Section):
    run: str
    step: Count | None
    out: str
    scale: float | None = Field(gt=0)


def main(args: Arguments) -> None:
    trained = opened(args.run, step=args.step)
    data = trained.data
    of_text: dict[str, Any] = {}
    if isinstance(data, TextData):
        of_text = {
            "bos_token_id": data.text_start,
            "eos_token_id": data.encoder.eot,
            "tokenizer": partial(tokenizers.write, data.encoder, bos=data.text_start),
        }
    model_class = export(trained.network(), trained.description, args.out, scale=args.scale, **of_text)
    print(f"wrote {args.out}: {model_class}; its README.md says how to open it")
