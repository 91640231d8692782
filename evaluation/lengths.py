"""Loss against context length: the same last tokens of each text, scored with more and more text before them.

Only what is read changes from length to length, so a rise means that the encoding breaks, and a fall that far text is
used. The loss at every position comes beside it, from one pass at the longest length.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import Config
from data.base import IGNORE, Data, Slice
from evaluation.results import PositionBin, Row, Score, make_row
from model import processes
from model.gpt import GPT

CHUNK = 2048  # tokens read in one pass by encodings that hold scores: longer texts go through the KV cache in pieces
BATCH_TOKENS = 4096  # tokens in a batch
BINS = 64  # of the loss by position


@torch.no_grad()
def token_losses(net: GPT, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of each target its cross-entropy in nats, fp32 [B, T], and whether another token was more probable, bool [B, T].

    `x`, `y` are int64 [B, T]; where `y` is IGNORE both are 0. Logits exist only for positions that are scored, so
    memory grows with T, not T x V.
    """
    was_training = net.training
    net.eval()
    losses = torch.zeros(y.shape, device=y.device)
    wrong = torch.zeros(y.shape, device=y.device, dtype=torch.bool)
    length = x.size(1)
    chunk = length if net.encodings[0].linear_memory else CHUNK
    cache = net.new_cache() if length > chunk else None
    for start in range(0, length, chunk):
        hidden = net.hidden(x[:, start : start + chunk], cache)  # [B, t, C]
        targets = y[:, start : start + chunk]
        (columns,) = (targets != IGNORE).any(0).nonzero(as_tuple=True)
        for piece in columns.split(max(1, BATCH_TOKENS // x.size(0))):
            logits = net.head(hidden[:, piece])[..., : net.vocab_size].float()
            nats = F.cross_entropy(logits.transpose(1, 2), targets[:, piece], ignore_index=IGNORE, reduction="none")
            losses[:, start + piece] = nats
            wrong[:, start + piece] = (logits.argmax(-1) != targets[:, piece]) & (targets[:, piece] != IGNORE)
    net.train(was_training)
    return losses, wrong


def own_starts(part: Slice, n: int) -> range:
    """Where this process's batches of the first `n` sequences begin."""
    step = max(1, BATCH_TOKENS // part.length)
    return range(processes.rank() * step, n, processes.count() * step)


def batches(part: Slice, limit: int | None, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """This process's part of the first `limit` sequences of a slice (None: all), in batches of about BATCH_TOKENS
    tokens, which are the same for any number of processes."""
    n = part.n if limit is None else min(part.n, limit)
    starts = own_starts(part, n)
    for start in starts:
        x, y = part.batch(start, min(n, start + starts.step // processes.count()))
        yield x.to(device), y.to(device)


def score(net: GPT, part: Slice, token_bytes: Tensor | None, limit: int | None = None) -> Score:
    """Summed loss over the scored tokens of a slice: the one measure, in training and after it.

    Each token counts once and alike, whatever the batches and the processes, which share the work. The sum is taken in
    float64.
    """
    device = next(net.parameters()).device
    total = Score()
    for x, y in batches(part, limit, device):
        losses, wrong = token_losses(net, x, y)
        scored = y[y != IGNORE]
        total.nats += float(losses.cpu().double().sum())
        total.tokens += scored.numel()
        total.wrong += int(wrong.sum())
        total.sequences += len(y)
        total.wrong_sequences += int(wrong.any(1).sum())
        if token_bytes is not None:
            total.bytes += int(token_bytes.to(device)[scored].sum())
    return sum(processes.gather(total), start=Score())


def validate(net: GPT, data: Data, cfg: Config, limit: int | None = None) -> Row:
    """The validation of a training run: every token of fixed windows of train_len, as trained."""
    part = data.validation(cfg.train_len, cfg.trainer.val_tokens)
    total = score(net, part, data.token_bytes, limit)
    return make_row(total, "as trained", "validation", part.length, cfg.train_len, data.task)


def position_metrics(net: GPT, data: Data, cfg: Config) -> dict[str, float]:
    """What the encoding measured in the validation that has just been made, by all processes."""
    part = data.validation(cfg.train_len, cfg.trainer.val_tokens)
    found = processes.gather((len(own_starts(part, part.n)), net.position_metrics()))
    found = [(weight, metrics) for weight, metrics in found if weight]
    total = sum(weight for weight, _ in found)
    return {name: sum(weight / total * float(metrics[name]) for weight, metrics in found) for name in found[0][1]}


def by_position(net: GPT, part: Slice, reading: str, limit: int | None = None) -> list[PositionBin]:
    """Mean loss at each position of a slice whose targets are all scored, in at most BINS bins of equal width."""
    device = next(net.parameters()).device
    nats, tokens = torch.zeros(part.length, dtype=torch.float64), torch.zeros(part.length, dtype=torch.int64)
    for x, y in batches(part, limit, device):
        nats += token_losses(net, x, y)[0].cpu().double().sum(0)
        tokens += (y != IGNORE).sum(0).cpu()
    nats, tokens = (torch.stack(processes.gather(of_each)).sum(0) for of_each in (nats, tokens))
    width = -(-part.length // BINS)
    bins = []
    for start in range(0, part.length, width):
        stop = min(part.length, start + width)
        n = int(tokens[start:stop].sum())
        loss = float(nats[start:stop].sum()) / n
        bins.append(PositionBin(reading=reading, start=start, stop=stop, loss=loss, tokens=n))
    return bins


def sliding(part: Slice, length: int, stride: int) -> Slice:
    """The texts of `part` in windows of `length` tokens, `stride` apart, with every target scored once: those of the
    first window, then what each further one adds, with length - stride tokens or more before it. The last window of a
    text may add fewer than `stride`.

    Raises:
        ValueError: the stride is longer than the window.
    """
    if stride > length:
        raise ValueError(f"eval.stride={stride} is longer than a window of {length} tokens: tokens would be left out")
    starts = [*range(0, part.length - length, stride), part.length - length]

    def batch(first: int, last: int) -> tuple[Tensor, Tensor]:
        windows = [divmod(i, len(starts)) for i in range(first, last)]  # (text, window in it)
        text = windows[0][0]
        xs, ys = part.batch(text, windows[-1][0] + 1)  # [texts, part.length]
        x = torch.stack([xs[i - text, starts[w] : starts[w] + length] for i, w in windows])
        y = torch.stack([ys[i - text, starts[w] : starts[w] + length] for i, w in windows])
        for row, (_, w) in zip(y, windows, strict=True):
            if w:
                row[: starts[w - 1] + length - starts[w]] = IGNORE
        return x, y

    return Slice(f"sliding window, stride {stride}", length, part.n * len(starts), batch)


class Lengths(NamedTuple):
    rows: list[Row]
    by_position: list[PositionBin]
    skipped: dict[str, list[int]]  # reading -> lengths it is not defined for


def evaluate(
    net: GPT,
    data: Data,
    cfg: Config,
    *,
    readings: slice = slice(None),
    limit: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Lengths:
    """Every reading of the encoding at every length of `cfg.eval`.

    Args:
        readings: which of the encoding's readings; default all.
        limit: sequences, at most. 1 makes a dry run, which meets the errors of the whole one, but for its memory.
        progress: called with a few words before each reading.
    """
    result = Lengths([], [], {})
    parts = data.slices(list(cfg.lengths), scored=cfg.scored, sequences=cfg.eval.sequences)
    if cfg.eval.stride and (texts := data.whole(max(cfg.lengths), cfg.eval.sequences)):
        parts += [sliding(texts, length, cfg.eval.stride) for length in cfg.lengths]
    for i in range(len(net.encodings[0].readings()))[readings]:
        with net.reading(lambda pe: pe.readings()[i]) as pe:  # noqa: B023 - called at once
            if progress:
                progress(f"evaluating {pe.label}")
            defined = [part for part in parts if pe.max_len is None or part.length <= pe.max_len]
            if len(defined) < len(parts):
                result.skipped[pe.label] = sorted({part.length for part in parts if part not in defined})
            for part in defined:
                total = score(net, part, data.token_bytes, limit)
                result.rows.append(make_row(total, pe.label, part.name, part.length, cfg.train_len, data.task))
            longest = max((part.length for part in defined), default=0)
            if cfg.eval.by_position and longest and (whole := data.whole(longest, cfg.eval.sequences)):
                result.by_position.extend(by_position(net, whole, pe.label, limit))
    return result
