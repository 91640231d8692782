"""Write a trained model, with its tokenizer, as a folder that transformers opens.

python scripts/export.py run=runs/rope-code out=rope-code-hf
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.export")

from pathlib import Path
from typing import Any

from pydantic import Field

from conf.schema import Count, Section
from data.base import build_data
from data.text import TextData
from ropewalk import hf
from ropewalk.app.cli import program
from ropewalk.app.init_from import opened
from ropewalk.app.run_dir import check_place, data_options, read_environment
from ropewalk.hf import tokenizers


class Arguments(Section):
    run: str
    step: Count | None
    out: str
    scale: float | None = Field(gt=0)


@program("export", Arguments)
def main(args: Arguments) -> None:
    path = opened(args.run, step=args.step)
    run_id = read_environment(path).run_id
    data = build_data(data_options(path, "prepared"))
    tokens: dict[str, Any] = {}
    if isinstance(data, TextData):
        tokens = {"bos_token_id": data.text_start, "eos_token_id": data.encoder.eot}

    def write_tokenizer(folder: Path) -> None:
        if isinstance(data, TextData):
            tokenizers.write(data.encoder, folder)
        # The weights are written by now, and the folder has no name yet: both must be of one run.
        check_place(path, run_id)

    name = hf.export(path, args.out, scale=args.scale, tokenizer=write_tokenizer, **tokens)
    print(f"wrote {args.out}: {name}; its README.md says how to open it")
