"""Ropewalk from Python: trained models, results of many runs, and position encodings for a network of your own.

import ropewalk

model = ropewalk.load("runs/rope-code")
model.logits("def main(")                      # [tokens, vocabulary]
print(model.generate("def main(", max_new_tokens=100, seed=1))
frame = ropewalk.runs("runs")                  # a pandas DataFrame of everything measured
pe = ropewalk.encoding("yarn", n_head=8, head_dim=64, train_len=1024, scale=4.0)
out = ropewalk.attend(pe, q, k, v)             # [B, H, T, D]
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.errors import HydraException
from torch import Tensor

import data as data_sources
from conf import compose
from conf.run_dir import check_identity, find, read_config
from data.base import Data
from model import position, serialization
from model.generation import check_tokens, generate
from model.gpt import GPT
from model.position import PositionEncoding, Shape

if TYPE_CHECKING:
    import pandas as pd


class Model:
    """A trained network with its tokenizer.

    Attributes:
        net: the network, in evaluation mode; `net(idx)` are logits [B, T, vocabulary] of token ids [B, T].
        data: its data source, for `encode` and `decode`.
    """

    def __init__(self, net: GPT, data: Data) -> None:
        self.net, self.data = net, data

    def encode(self, text: str) -> Tensor:
        """Token ids int64 [T] of a text, on the network's device. Raises ValueError for what cannot be encoded."""
        ids = torch.tensor(self.data.encode(text), dtype=torch.int64, device=self.net.embedding.weight.device)
        if len(ids):
            check_tokens(self.net, ids)
        return ids

    @torch.inference_mode()
    def logits(self, text: str) -> Tensor:
        """Logits fp32 [T, vocabulary] of the token that follows each token of `text`."""
        ids = self.encode(text)
        with self.net.at_scale(self.net.scale_for(len(ids))):
            return self.net(ids[None])[0, :, : self.net.vocab_size].float()

    def generate(self, prompt: str, max_new_tokens: int = 200, **options: Any) -> str:
        """What follows `prompt`; `options` are those of `model.generation.generate`, such as temperature and seed.

        A scaled encoding uses its scale if the text will be longer than the network was trained for.
        """
        ids = self.encode(prompt)
        with self.net.at_scale(self.net.scale_for(len(ids) + max_new_tokens)):
            new = [int(token) for token in generate(self.net, ids[None], max_new_tokens, **options)]
        return self.data.decode(new)


@contextmanager
def _value_errors() -> Iterator[None]:
    """Hydra's errors, which are no ValueError, as one with a message for people."""
    try:
        yield
    except HydraException as error:
        raise ValueError(compose.explain(error)) from None


def load(run: str | Path, *, pe: str | None = None, device: str = "cpu", **options: Any) -> Model:
    """The trained model in a run directory.

    Args:
        pe: read its weights zero-shot with this encoding, such as "yarn"; `options` are its own, such as scale=8.0.

    Raises:
        ValueError: no run, a damaged one, or an encoding that cannot read its weights.
    """
    path = find(run)
    chosen = None
    if pe is not None:
        from conf.init_from import variants

        with _value_errors():
            (chosen,) = variants(serialization.describe(path), [pe], options)
    elif options:
        raise ValueError(f"{', '.join(options)}: options of an encoding need its name, as in pe='yarn'")
    data = data_sources.build(read_config(path)["data"])
    check_identity(path, data.tokenizer_identity())
    return Model(serialization.load(path, pe=chosen).to(device), data)


def runs(*folders: str | Path) -> "pd.DataFrame":
    """Everything measured on the runs in or below the folders, a row for each number.

    Columns:
        run, path, seed, data, train_len: the run.
        encoding, variant, scale, zero_shot: how its weights were read: name of the encoding, its label in the results,
            its scale, and whether that is another encoding or scale than it was trained with.
        label: the same in words, with what else sets the run apart; equal for runs that differ in the seed alone.
        step: optimizer steps that the weights have had.
        kind, name, length: the measure ("lengths", "by_position", "far_copies" or "passkeys"), what of it ("text", a
            task's difficulty, "distance 256-511", ...), and the tokens that were read.
        value, unit: the mean over the texts.
        low, high: its 95 % interval over the texts of this one run; it says nothing of other seeds. NaN of one text.
        texts: number of texts.

    Runs that are broken, unfinished or twice there are named in a warning.

    Raises:
        ValueError: a folder does not exist.
    """
    import pandas as pd

    from evaluation import frame
    from evaluation.statistics import estimate

    found = frame.load(folders)
    if found.left_out:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in found.left_out)
        warnings.warn(f"runs left out or incomplete: {reasons}", stacklevel=2)
    about = ["run", "path", "seed", "data", "train_len", "encoding", "variant", "scale", "zero_shot", "label", "step"]
    columns = [*about, "kind", "name", "length", "value", "unit", "low", "high", "texts"]
    if found.results.empty:
        return pd.DataFrame(columns=columns)
    of_run = found.runs[["name", "data", "train_len"]].rename(columns={"name": "run"})
    rows = found.results.rename(columns={"line": "label"}).join(of_run, on="path")
    estimates = pd.DataFrame([estimate(sample) for sample in rows["sample"]], index=rows.index)
    return rows.join(estimates[["low", "high", "texts"]])[columns]


def encoding(
    name: str, *, n_head: int, head_dim: int, train_len: int, n_kv_head: int | None = None, dim: int | None = None,
    seed: int = 0, **options: Any,
) -> PositionEncoding:  # fmt: skip
    """The encoding conf/pe/`name`.yaml for one layer of a network of your own, with initial parameters; see `attend`.

    A scaled encoding has its `scale` in effect at once: set `active_scale` to change it.

    Args:
        n_kv_head: heads of keys and values; None: n_head.
        dim: width of the layer's input; None: n_head * head_dim.
        seed: of the initial parameters.
        options: those of its YAML, such as base=1e6 or window=256.

    Raises:
        ValueError: no such encoding or option, or a bad value.
    """
    with _value_errors():
        chosen = compose.encoding({"pe": name, **options})
    shape = Shape(dim or n_head * head_dim, n_head, n_kv_head or n_head, head_dim, train_len, n_layer=1)
    (pe,) = position.build(chosen, shape)
    with torch.no_grad():
        pe.reset_parameters(torch.Generator().manual_seed(seed))
    pe.active_scale = max(pe.scales)
    return pe


def attend(pe: PositionEncoding, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None) -> Tensor:
    """Causal attention over whole sequences with a position encoding: [B, H, T, D].

    Args:
        q: queries [B, H, T, D]. k, v: keys and values [B, Hkv, T, D]; H is a multiple of Hkv.
        x: the layer's input [B, T, dim], for encodings that depend on it (those that override `state`).
    """
    length = q.size(2)
    state = {} if x is None else pe.state(x)
    return pe.attend(q, k, v, state, pe.context(torch.arange(length, device=q.device), length, length))
