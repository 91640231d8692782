"""Texts that several processes read together: the memory that each of them takes, and the time beside DDP's."""

import functools
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from conf.schema import GPTConfig
from lab.benchmarks.measure import interleave, peak_memory, ratio
from model.gpt import GPT
from ropewalk.app import cli
from ropewalk.app.trained import resolve_encoding
from ropewalk.training.context_parallel import ContextParallel
from ropewalk.training.hardware import tune

VOCABULARY = 256
RANKS = (1, 2, 4)


class Job(NamedTuple):
    """What one rank measures."""

    model: GPTConfig
    pe: dict[str, Any]
    length: int
    ranks: int
    rounds: int
    meeting: str  # a file that does not exist yet


class Found(NamedTuple):
    kept: int  # bytes that the backward pass of one text needs, without weights
    peak: int  # most bytes held at once in both passes of one text, beyond those held before
    shared: list[float]  # seconds of both passes of `ranks` texts that all ranks read together, one of each round
    alone: list[float]  # and of one text for each rank


def context(options: Any) -> list[dict[str, str]]:
    """Return a row for each encoding and number of ranks: MB a rank, and time against as many texts, one a rank."""
    rows = []
    for encoding in options.encodings or ["rope"]:
        pe = cli.encoding(encoding)
        for ranks in RANKS:
            row = {"": pe["name"], "ranks": str(ranks)}
            for length in options.lengths:
                print(f"{pe['name']} at {length}, ranks: {ranks}", file=sys.stderr, flush=True)
                found = measured(options, pe, length, ranks)
                row[f"kept, {length:,}"] = f"{max(rank.kept for rank in found) / 1e6:,.1f} MB"
                row[f"peak, {length:,}"] = f"{max(rank.peak for rank in found) / 1e6:,.1f} MB"
                # A round takes as long as its slowest rank.
                shared = [max(seconds) for seconds in zip(*[rank.shared for rank in found], strict=True)]
                alone = [max(seconds) for seconds in zip(*[rank.alone for rank in found], strict=True)]
                row[f"time, {length:,}"] = ratio(shared, alone) if ranks > 1 else ""
            rows.append(row)
    return rows


def measured(options: Any, encoding: dict[str, Any], length: int, ranks: int) -> list[Found]:
    """Measure with `ranks` processes of one thread each, on the CPU."""
    model = GPTConfig(**options.model)
    pe, _ = resolve_encoding(encoding, model, length)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(model, pe, length, ranks, options.rounds, str(Path(folder, "meeting")))
        with ProcessPoolExecutor(ranks, mp_context=multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(functools.partial(of_rank, job), range(ranks)))


def of_rank(job: Job, rank: int) -> Found:
    """Measure in this process, rank `rank` of `job.ranks`. All ranks call it."""
    torch.set_num_threads(1)
    tune("cpu")
    dist.init_process_group("gloo", f"file://{job.meeting}", rank=rank, world_size=job.ranks)
    net = GPT(job.model, job.pe, vocab_size=VOCABULARY, train_len=job.length, seed=0)
    group = None
    if job.ranks > 1:
        group = ContextParallel.of(init_device_mesh("cpu", (job.ranks,)).get_group())
    texts = torch.randint(VOCABULARY, (job.ranks, job.length), generator=torch.Generator().manual_seed(0))

    def both(group: ContextParallel | None, texts: Tensor) -> Tensor:
        net.context_parallel = group
        loss = net(texts, targets=texts)
        loss.backward()
        return loss.detach()

    def seconds(group: ContextParallel | None, texts: Tensor) -> float:
        dist.barrier()
        start = time.perf_counter()
        both(group, texts)
        return time.perf_counter() - start

    both(group, texts[:1])  # the gradients' memory is allocated here
    kept = kept_memory(net, group, texts[:1])
    peak = peak_memory(lambda: both(group, texts[:1]), "cpu")
    shared, alone = interleave(lambda: seconds(group, texts), lambda: seconds(None, texts[rank : rank + 1]), job.rounds)
    dist.barrier()
    dist.destroy_process_group()
    return Found(kept, peak, shared, alone)


def kept_memory(net: GPT, group: ContextParallel | None, texts: Tensor) -> int:
    """Return the bytes of all storages that the forward pass keeps for the backward pass, but for the weights."""
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    net.context_parallel = group
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = net(texts, targets=texts)
    del loss
    return sum(kept.values())
