"""Ropewalk from Python: trained models, results of many runs, and encodings for a network of your own. See README."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
from omegaconf import DictConfig
from pydantic import ConfigDict, Field, validate_call
from torch import Tensor

from conf.options import CONF_DIR, encoding_names
from conf.options import encoding as options_of_encoding
from conf.schema import MAX_LEN, GPTConfig, parse
from data.base import Data
from model.generation import check_ids, generate
from model.gpt import GPT
from model.position import PositionEncoding, Shape, build_encodings, layer, parts
from model.position.network import for_length
from ropewalk.app.compose import composed
from ropewalk.app.configure import configure
from ropewalk.app.init_from import opened
from ropewalk.app.resolve import variants
from ropewalk.report import frame, table
from ropewalk.run.directory import RunDir
from ropewalk.run.stop import EXIT_INTERRUPTED

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Decorates a function: arguments of other types than its signature says are a ValueError, which lists them.
checked = validate_call(config=ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False))

encodings = encoding_names


class Model:
    """A trained network in evaluation mode, with its tokenizer.

    Attributes:
        net: `net(idx)` are the logits [B, T, vocabulary] of token ids `idx` [B, T]. It does not check that these are
            in the vocabulary, for which a GPU would have to wait; `logits` and `generate` do.
        data: the data it was trained on, which encodes and decodes text.
    """

    def __init__(self, net: GPT, data: Data) -> None:
        self.net = net
        self.data = data

    @checked
    def encode(self, text: str | Tensor) -> Tensor:
        """Return the token ids of a text as the network reads it, int64 [T], on its device: see `Data.prompt`.

        Token ids [T] may stand for a text, here and in the methods below.

        Raises ValueError: it cannot be encoded, or is a tensor of another kind.
        """
        if not isinstance(text, str) and (text.dim() != 1 or text.dtype not in INTEGERS):
            raise ValueError(f"{text.dtype} {tuple(text.shape)} is not token ids [T]: model.net(idx) takes [B, T]")
        ids = self.data.prompt(text) if isinstance(text, str) else text
        return torch.as_tensor(ids, dtype=torch.int64, device=self.net.embedding.weight.device)

    @checked
    @torch.inference_mode()
    def logits(self, text: str | Tensor) -> Tensor:
        """Return the logits of the token that follows each token of `text`, fp32 [T, vocabulary]."""
        ids = self.encode(text)
        check_ids(ids, self.net.vocab_size)
        encodings = for_length(self.net.encodings, len(ids))
        return self.net(ids[None], encodings=encodings)[0, :, : self.net.vocab_size].float()

    def generate(self, prompt: str | Tensor, max_new_tokens: int = 200, **options: Any) -> str:
        """Write a continuation of `prompt`: what `stream`, with its options, yields."""
        return "".join(self.stream(prompt, max_new_tokens=max_new_tokens, **options))

    @checked
    def stream(
        self, prompt: str | Tensor, max_new_tokens: Annotated[int, Field(ge=1, le=MAX_LEN)] = 200, *,
        temperature: Annotated[float, Field(ge=0)] = 1.0, top_k: Annotated[int, Field(ge=1)] | None = None,
        seed: Seed = 0,
    ) -> Iterator[str]:  # fmt: skip
        """Yield a continuation of `prompt` in pieces, each as soon as it is decoded.

        The options are those of `model.generation.generate`. A scaled encoding uses its scale if the text will be
        longer than the training length.
        """
        ids = self.encode(prompt)
        tokens = ids.tolist()
        # The whole text is decoded for each token: a tokenizer may drop the space before the first token of what it
        # decodes, and a character may need several tokens.
        n_shown = len(self.data.decode(tokens))
        encodings = for_length(self.net.encodings, len(ids) + max_new_tokens)
        for token in generate(
            self.net, ids[None], max_new_tokens, encodings=encodings, temperature=temperature, top_k=top_k, seed=seed
        ):
            tokens.append(int(token))
            text = self.data.decode(tokens)
            # An incomplete character is decoded as this one: wait for the rest of it.
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[n_shown:]
                n_shown = len(text)
        yield self.data.decode(tokens)[n_shown:]


@checked
def load(
    run: str | Path, *, step: int | None = None, pe: str | Mapping[str, Any] | None = None, device: str = "cpu",
    cache_dir: str = "prepared", **options: Any,
) -> Model:  # fmt: skip
    """Load the trained model in a run directory, or the model of transformers hf:FOLDER_OR_HUB_ID.

    A model of transformers becomes a run directory first.

    Args:
        step: of the checkpoint to take; None: the final weights, or the newest checkpoint of a run that was stopped.
        pe: the encoding that reads the weights zero-shot: a name such as "yarn", with `options` such as scale=8.0, or
            all of its options, resolved.
        cache_dir: folder of tokenised data, for `data.prepare`.

    Raises ValueError: no run, a damaged one, no such device, or an encoding that cannot read its weights.
    """
    try:
        torch.ones(1, device=device).item()  # "meta" has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={device!r} is not available here: {str(error).splitlines()[0]}") from None
    trained = opened(run, cache_dir, step)
    if options and not isinstance(pe, str):
        raise ValueError(f"{', '.join(options)}: options of an encoding need its name, as in pe='yarn'")
    variant = None
    if pe is not None:
        spec = {"pe": pe, **options} if isinstance(pe, str) else pe
        (variant,) = variants(trained.description, [spec])
    return Model(trained.network(variant).to(device), trained.data)


@checked
def curves(*folders: str | Path, only: Sequence[str] = (), exclude: Sequence[str] = ()) -> pd.DataFrame:
    """The training curves of the runs in or below the folders: a row for each row of their metrics.jsonl.

    Columns: run, path, seed, data, train_len, encoding, label as of `runs`; step, tokens; and what was logged, such as
    train/loss and val/bits_per_byte.

    Args:
        only, exclude: as of `runs`.

    Raises ValueError: a folder does not exist.
    """
    return frame.curves(frame.load(folders, only, exclude)).rename(columns={"name": "run"})


@checked
def runs(
    *folders: str | Path, only: Sequence[str] = (), exclude: Sequence[str] = (),
    reference: str = "rope",
) -> pd.DataFrame:  # fmt: skip
    """Everything measured on the runs in or below the folders, as one long table of plain columns.

    It has a row for each run, reading of its weights, measure, part and length; and one over all runs that differ in
    the seed alone, where `seed` is missing and `run` names them all.

    Args:
        folders: also files as scripts/report.py out=all.parquet writes.
        only: patterns of run names, as in ["rope-*"]; none: all runs.
        exclude: patterns of run names that are passed over.
        reference: encoding or line that the others are compared with.

    Columns:
        line, base, settings: the run in words, with how it is read; the same weights as trained; what sets it apart.
        section, data, train_len, step, run, path, seed, seeds: the runs, and the steps that the weights have had.
        encoding, variant, scale, reading, zero_shot: how the weights were read.
        measure, eval, part, task, difficulty, depth, span_start, span_end, continuation: what was measured, as in
            `evals/`; "text" or a task, its eval set, the depth of a needle, distances or positions in tokens, of far
            copies whether the text goes on as before. The part "far" is all that needs text beyond train_len.
        length, times, texts, documents: tokens read, in training lengths, and of how many texts and documents.
        quantity, unit, value, low, high: loss, error, found (answers), gain or share, with its 95 % interval; of an
            error, the smallest and the largest of the seeds that count.
        gain: how much lower the loss is than on the text cut to `cut` tokens, the training length of `base`; lead: than
            that of the `reference` on the text cut to its training length; difference: minus the reference; behind:
            minus the best line; above: minus the best possible predictor; share: of the gain that is possible. All are
            paired by seed and text, and have columns such as gain_low and gain_high.
        verdict, tolerance: what the gain is worth, see docs/usage.md; rank, tied: the order at this length, and whether
            a line is not told apart from the best one.
        learned: of a task, the seeds that learned it, whose median `value` is.
        parameters, tokens_per_s, peak_memory_mb: of training. command, commit, ..: what measured it.

    The losses at the longest length, a column for each seed:

        far = frame[frame.seed.notna() & (frame.measure == "lengths") & (frame.length == frame.length.max())]
        far.pivot_table("value", "line", "seed")

    The line "best possible" is the best possible predictor of the texts, where it is known. Runs that are broken,
    unfinished or there twice are named in a warning.

    Raises ValueError: a folder does not exist.
    """
    loaded = frame.load(folders, only, exclude)
    if loaded.left_out:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in loaded.left_out)
        warnings.warn(f"runs left out or incomplete: {reasons}", stacklevel=3)
    return table.results(loaded, reference)


@checked
def train(*overrides: str, config: DictConfig | None = None) -> Path:
    """Train, evaluate and report a run in this process, or resume it, as `python train.py` does with these overrides.

    Args:
        overrides: those of the command line, such as "pe=yarn" and "trainer.max_steps=100".
        config: instead of overrides: what a Hydra program of your own has composed from conf/train.yaml.

    Returns:
        The directory of the run.

    Raises:
        ValueError: a mistake, with the remedy, before anything is written.
        KeyboardInterrupt: after Ctrl-C, and a checkpoint. The same call resumes.
        SystemExit: after another signal, and a checkpoint.
    """
    spec = find_spec("train")
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != CONF_DIR.parent / "train.py":
        where = spec.origin if spec else "no file"
        raise ValueError(f"train.py is {where}, not Ropewalk's: give that file another name")
    from train import train as train_run

    with composed("train", *overrides) if config is None else nullcontext(config) as chosen:
        cfg = configure(chosen)
    try:
        train_run(cfg)
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt from None
        raise
    return RunDir(cfg).path


@checked
def encoding(
    name: str, *, n_head: int, head_dim: int, train_len: int,
    n_kv_head: int | None = None, dim: int | None = None, seed: Seed = 0, **options: Any,
) -> PositionEncoding:  # fmt: skip
    """Build the encoding conf/pe/`name`.yaml for one layer of a network of your own, with initial parameters.

    Call it through `attend`. A scaled encoding starts with its `scale` in effect; set `active_scale` to change it.

    Args:
        n_kv_head: heads of keys and values; None: n_head.
        dim: width of the layer's input; None: n_head * head_dim.
        options: those of its YAML, such as base=1e6 or window=256.

    Raises ValueError: no such encoding or option, a bad value, or a pattern over layers.
    """
    chosen = options_of_encoding({"pe": name, **options})
    if "pattern" in chosen:
        by_name = {key: part["name"] for key, part in parts(chosen).items()}
        raise ValueError(f"{name} is a pattern over layers: build its parts, one for each layer: {by_name}")
    sizes = {"n_head": n_head, "head_dim": head_dim, "n_kv_head": n_kv_head, "n_layer": 1}
    cfg = parse(GPTConfig, sizes | {"dim": n_head * head_dim if dim is None else dim})
    (pe,) = build_encodings(chosen, Shape.of(cfg, train_len))
    layer.init_parameters(pe, torch.Generator().manual_seed(seed))
    pe.active_scale = max(pe.scales)
    return pe


@checked
def attend(
    pe: PositionEncoding, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None, *, embedded: bool = False
) -> Tensor:
    """Compute causal attention over whole sequences with a position encoding: [B, H, T, D].

    There is no cache: a sequence is given whole. Absolute encodings act on the token embeddings instead: call
    `pe.embed(x, pos)` before the first layer, and then `attend` with embedded=True.

    Args:
        q: queries [B, H, T, D], with the H = n_head and D = head_dim of `encoding`.
        k, v: keys and values [B, Hkv, T, D], with its n_kv_head.
        x: the layer's input [B, T, dim], for encodings that depend on it.

    Raises ValueError: a tensor has another shape, type or device than the others or the encoding's parameters; the
    encoding depends on x, which is not given; or it is absolute, and nothing says that the embeddings have their
    positions.
    """
    _check_tensors(pe, {"q": q, "k": k, "v": v} | ({} if x is None else {"x": x}))
    if type(pe).embed is not PositionEncoding.embed and not embedded:
        raise ValueError(f"{type(pe).__name__} acts on token embeddings: call pe.embed(x, pos), and pass embedded=True")
    length = q.size(2)
    ctx = layer.make_context(pe, torch.arange(length, device=q.device), length, length)
    state = {} if x is None else pe.state(x)
    # An encoding looks up what it has made of x by name, so that a missing x is a missing key.
    try:
        heads = ctx.attend(pe, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), state, layer=pe)
        return heads.transpose(1, 2)  # [B, H, T, D]
    except KeyError as error:
        raise ValueError(f"{type(pe).__name__} needs {error}, made of the layer's input: pass it as x") from None


def _check_tensors(pe: PositionEncoding, given: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the tensors are those of one call of `attend`."""
    q = given["q"]
    if q.dim() != 4:
        raise ValueError(f"q is {tuple(q.shape)}, not [B, H, T, D]")
    batch, _, length, _ = q.shape
    of_keys = (batch, pe.n_kv_head, length, pe.head_dim)
    shapes = {
        "q": (batch, pe.n_head, length, pe.head_dim),
        "k": of_keys,
        "v": of_keys,
        "x": (batch, length, pe.dim),
    }
    for name, tensor in given.items():
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, not {shapes[name]}, as q has T = {length}; "
                "use transpose(1, 2) if it is [B, T, H, D]; there is no cache"
            )
        # The layer's input may be wider than what attention computes in.
        is_of_q = name == "x" or tensor.dtype == q.dtype
        if not (tensor.is_floating_point() and is_of_q and tensor.device == q.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, q {q.dtype} on {q.device}: "
                "all must be floating-point numbers of one type, on one device"
            )
        for parameter in pe.parameters():
            if parameter.device != tensor.device or parameter.dtype.itemsize < tensor.dtype.itemsize:
                raise ValueError(
                    f"{name} is {tensor.dtype} on {tensor.device}, parameters {parameter.dtype} on {parameter.device}: "
                    "call pe.to(x)"
                )
