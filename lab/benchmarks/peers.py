"""The step of train.py, and its reading of longer text, beside GPTs of other projects: same shape, same batches."""

import runpy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from conf.errors import ConfigError
from conf.schema import GPTConfig, Optim
from lab.benchmarks.measure import Row, interleave, peak_memory, ratio
from lab.benchmarks.training import configuration, loop, made, seconds_of, trained

TIMES = 4  # an evaluation reads so many times the training length
CLOSE = 0.02  # the first losses may differ by this share: all have untrained weights of the same size

Build = Callable[[GPTConfig, int, int, str], nn.Module]  # shape, size of the vocabulary, longest text, folder


class Peer(NamedTuple):
    """Somebody else's network."""

    build: Build  # raises ImportError: it is not installed
    model: dict[str, Any]  # options of our network that give it the same shape
    encoding: str = "rope"  # of ours, the same as its own


def nanogpt(shape: GPTConfig, vocab_size: int, longest: int, folder: str) -> nn.Module:
    theirs = runpy.run_path(f"{folder}/model.py", run_name="nanogpt")
    config = theirs["GPTConfig"](
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.dim,
        block_size=longest,
        vocab_size=vocab_size,
        dropout=0.0,
        bias=False,
    )
    return theirs["GPT"](config)


def litgpt(shape: GPTConfig, vocab_size: int, longest: int, folder: str) -> nn.Module:
    from litgpt.model import GPT, Config

    config = Config(
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.dim,
        intermediate_size=shape.hidden,
        block_size=longest,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    return GPT(config)


def x_transformers(shape: GPTConfig, vocab_size: int, longest: int, folder: str) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=shape.dim,
        depth=shape.n_layer,
        heads=shape.n_head,
        attn_dim_head=shape.head_width,
        rotary_pos_emb=True,
        rotary_emb_dim=shape.head_width,
        attn_flash=True,
        ff_no_bias=True,
    )
    return TransformerWrapper(
        num_tokens=vocab_size, max_seq_len=longest, attn_layers=layers, use_abs_pos_emb=False, tie_embedding=True
    )


def of_transformers(kind: str, shape: GPTConfig, vocab_size: int, longest: int, folder: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        num_hidden_layers=shape.n_layer,
        num_attention_heads=shape.n_head,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        max_position_embeddings=longest,
        vocab_size=vocab_size,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        # Of GPT-2 alone.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return AutoModelForCausalLM.from_config(config)


PEERS = {
    "nanoGPT": Peer(nanogpt, {"mlp": "gelu_exact"}, "learned"),
    "nanoGPT, ours with rope": Peer(nanogpt, {"mlp": "gelu_exact"}),
    "litgpt": Peer(litgpt, {"mlp": "gelu_exact", "tie_embeddings": False}),
    "x-transformers": Peer(x_transformers, {"mlp": "gelu_exact"}),
    "GPT-2 of transformers": Peer(partial(of_transformers, "gpt2"), {"bias": True}, "learned"),
    "Llama of transformers": Peer(partial(of_transformers, "llama"), {"mlp": "swiglu", "norm": "rmsnorm"}),
}


class Side:
    """One of two networks that are compared, with what a training needs. Each method is one measurement.

    Args:
        own: ours, trained by train.py; else the peer's, trained by the shortest loop with the settings of PyTorch that
            its users have.

    Raises ImportError: the peer is not installed.
    """

    def __init__(self, options: Any, peer: Peer, *, own: bool) -> None:
        sections = options.model_copy(update={"model": options.model | peer.model})
        cfg = configuration(sections, peer.encoding)
        self.steps = options.steps
        self.hardware, data, net = made(cfg, tuned=own)
        self.net: nn.Module = net
        longest = TIMES * cfg.train_len
        x, y = data.validation(longest, cfg.step_tokens).batch(0, max(1, cfg.trainer.batch_size // TIMES))
        self.text = x.to(self.hardware.device), y.to(self.hardware.device)
        if own:
            self.losses = trained(cfg)
            net.materialise(self.hardware.device)
            net.init_weights(cfg.seed)
            self.loss_of = lambda x, y: net(x, targets=y)
            return
        theirs = peer.build(cfg.model, data.vocab_size, longest, options.nanogpt).to(self.hardware.device)
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=cfg.model.init_std)
        self.net = theirs
        self.loss_of = partial(_loss, theirs, peer.build is nanogpt)
        optimizer = _optimizer(theirs, cfg.optim, self.hardware.device)
        self.losses = loop(cfg, self.hardware, data, theirs, optimizer, self.loss_of)

    def first_loss(self) -> float:
        """The loss of untrained weights: the first of the measurements."""
        return float(next(self.losses))

    def memory(self) -> float:
        """Peak of a step beyond what is held before it, in MB."""
        return peak_memory(partial(next, self.losses), self.hardware.device) / 2**20

    def step(self) -> float:
        """Seconds of a round of steps."""
        return seconds_of(self.losses, self.steps)

    def reading(self) -> float:
        """Seconds of the loss of long texts, without gradients."""
        self.net.eval()
        start = perf_counter()
        with torch.no_grad(), self.hardware.autocast():
            float(self.loss_of(*self.text))
        return perf_counter() - start


def _loss(net: nn.Module, has_loss: bool, x: Tensor, y: Tensor) -> Tensor:
    if has_loss:  # nanoGPT computes all logits only where it gets the targets
        return net(x, y)[1]
    found = net(x)  # logits, or an object that has them
    return nn.functional.cross_entropy(getattr(found, "logits", found).flatten(0, 1), y.flatten())


def _optimizer(net: Any, optim: Optim, device: str) -> torch.optim.Optimizer:
    """Return nanoGPT's own optimizer, or that of PyTorch which users of the others take, with our settings."""
    betas = (optim.beta1, optim.beta2)
    if hasattr(net, "configure_optimizers"):
        return net.configure_optimizers(optim.weight_decay, optim.lr, betas, device)
    return torch.optim.AdamW(net.parameters(), optim.lr, betas, weight_decay=optim.weight_decay, fused=True)


_peers: list[Side] = []  # of a process for one


def _build(options: Any, name: str) -> None:
    """Build a peer in its own process."""
    sys.stdout = sys.stderr  # nanoGPT prints what it builds, and stdout is for the table
    _peers.append(Side(options, PEERS[name], own=False))


def _ask(process: Executor, what: str) -> float:
    """A measurement of a peer in its own process."""
    return process.submit(_asked, what).result()


def _asked(what: str) -> float:
    """The same within that process: what the method `what` of a `Side` returns."""
    return getattr(_peers[0], what)()


def peers(options: Any) -> Iterator[Row]:
    """Yield a row for each of PEERS that is installed: what ours takes beside it, in turns.

    Each peer has a process of its own, which train.py's settings of PyTorch and of the allocator do not reach.

    Raises:
        ConfigError: `options.nanogpt` is no folder of nanoGPT, or the first losses differ: it is not the same work.
    """
    if options.nanogpt and not Path(options.nanogpt, "model.py").is_file():
        raise ConfigError(f"nanogpt={options.nanogpt}: name the folder of a checkout of nanoGPT, with its model.py")
    for name, peer in PEERS.items():
        if peer.build is nanogpt and not options.nanogpt:
            continue
        print(name, file=sys.stderr, flush=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            try:
                process.submit(_build, options, name).result()
            except ImportError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            yield {"": name} | _row(options, peer, partial(_ask, process))


def _row(options: Any, peer: Peer, theirs: Callable[[str], float]) -> Row:
    ours = Side(options, peer, own=True)
    our_loss, their_loss = ours.first_loss(), theirs("first_loss")
    if abs(their_loss / our_loss - 1) > CLOSE:
        raise ConfigError(f"the first losses are {our_loss:.3f} and {their_loss:.3f}: not the same work")
    row = {"MB of a step: ours, theirs": f"{ours.memory():.0f}, {theirs('memory'):.0f}"}
    our_seconds, seconds = interleave(ours.step, partial(theirs, "step"), options.rounds)
    tokens = options.trainer["batch_size"] * options.train_len * options.steps
    row["tokens/s"] = f"{tokens / median(our_seconds):,.0f}"
    row["speed of a step: ours / theirs"] = ratio(seconds, our_seconds)
    row[f"speed at {TIMES}x: ours / theirs"] = ""
    if peer.encoding == "rope" and peer.build is not nanogpt:  # learned positions end where the training did
        our_seconds, seconds = interleave(ours.reading, partial(theirs, "reading"), options.rounds)
        row[f"speed at {TIMES}x: ours / theirs"] = ratio(seconds, our_seconds)
    return row
