"""Write a trained model as a folder that transformers opens.

python scripts/export.py run=runs/yarn-code out=yarn-code-hf reading=scaled

reading=trained, the default, writes the encoding as it was trained; reading=scaled at its scale, for longer texts.
"""

from pathlib import Path
from typing import Literal

import conf.cli
import data as data_sources
from conf.rundir import find, read_config
from conf.schema import Section, parse
from data.text import TextData
from model import store
from model.pretrained import export


class Arguments(Section):
    run: str
    out: str
    reading: Literal["trained", "scaled"] = "trained"


def main(arguments: dict[str, str]) -> None:
    args = parse(Arguments, arguments, strings=True)
    path = find(args.run)
    net = store.load(path)
    data = data_sources.build(read_config(path)["data"])
    eos = data.tokenizer.eot if isinstance(data, TextData) else None
    with net.reading(lambda pe: pe.readings()[0 if args.reading == "trained" else -1]) as pe:
        export(net, Path(args.out), eos=eos, tokenizer=path / "tokenizer")
    print(f"{args.out}: {type(pe).__name__}, {pe.label}")


if __name__ == "__main__":
    conf.cli.script(main)
