"""The step of train.py, and its reading of longer text, beside GPTs of other projects: same shape, same batches."""

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from conf.errors import ConfigError
from conf.schema import GPTConfig, Optim
from lab.benchmarks.measure import Row, interleave, peak_memory, ratio
from lab.benchmarks.training import configuration, loop, made, timed, trained
from ropewalk.training.hardware import Hardware

TIMES = 4  # an evaluation reads so many times the training length
CLOSE = 0.02  # the first losses may differ by this share: all have untrained weights of the same size

Build = Callable[[GPTConfig, int, int, Path], nn.Module]  # shape, size of the vocabulary, longest text, folder


class Peer(NamedTuple):
    """Somebody else's network."""

    build: Build  # raises ImportError: it is not installed
    encoding: str = "rope"  # of ours, the same as its own
    model: Mapping[str, Any] = MappingProxyType({})  # options of our network that give it the same shape


def nanogpt(shape: GPTConfig, vocab_size: int, longest: int, folder: Path) -> nn.Module:
    with contextlib.redirect_stdout(sys.stderr):  # it prints what it builds, and stdout is for the table
        theirs = runpy.run_path(str(folder / "model.py"), run_name="nanogpt")
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


def litgpt(shape: GPTConfig, vocab_size: int, longest: int, folder: Path) -> nn.Module:
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


def x_transformers(shape: GPTConfig, vocab_size: int, longest: int, folder: Path) -> nn.Module:
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


def gpt2(shape: GPTConfig, vocab_size: int, longest: int, folder: Path) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.dim,
        n_positions=longest,
        vocab_size=vocab_size,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def llama(shape: GPTConfig, vocab_size: int, longest: int, folder: Path) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=shape.n_layer,
        num_attention_heads=shape.n_head,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        max_position_embeddings=longest,
        vocab_size=vocab_size,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


PEERS = {
    "nanoGPT": Peer(nanogpt, "learned"),
    "nanoGPT, ours with rope": Peer(nanogpt),
    "litgpt": Peer(litgpt, model={"tie_embeddings": False}),
    "x-transformers": Peer(x_transformers),
    "GPT-2 of transformers": Peer(gpt2, "learned", {"bias": True}),
    "Llama of transformers": Peer(llama, model={"mlp": "swiglu", "norm": "rmsnorm"}),
}


def peers(options: Any) -> Iterator[Row]:
    """Yield a row for each of PEERS that is installed: what ours takes beside it, in turns.

    Raises:
        ConfigError: `options.nanogpt` is no folder of nanoGPT, or the first losses differ: it is not the same work.
    """
    folder = Path(options.nanogpt or "")
    if options.nanogpt and not (folder / "model.py").is_file():
        raise ConfigError(f"nanogpt={options.nanogpt}: name the folder of a checkout of nanoGPT, with its model.py")
    for name, peer in PEERS.items():
        if peer.build is nanogpt and not options.nanogpt:
            continue
        print(name, file=sys.stderr, flush=True)
        try:
            yield {"": name} | _row(options, peer, folder)
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)


def _row(options: Any, peer: Peer, folder: Path) -> Row:
    cfg = configuration(options.model_copy(update={"model": options.model | {**peer.model}}), peer.encoding)
    hardware, data, ours = made(cfg)
    longest = TIMES * cfg.train_len
    theirs = peer.build(cfg.model, data.vocab_size, longest, folder).to(hardware.device)
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=cfg.model.init_std)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        if peer.build is nanogpt:
            return theirs(x, y)[1]
        found = theirs(x)  # logits, or an object that has them
        return cross_entropy(getattr(found, "logits", found).flatten(0, 1), y.flatten())

    steps = {
        "ours": trained(cfg),
        "theirs": loop(cfg, hardware, data, theirs, _optimizer(theirs, cfg.optim, hardware.device), loss_of),
    }
    first = {side: next(losses) for side, losses in steps.items()}
    if abs(first["theirs"] / first["ours"] - 1) > CLOSE:
        raise ConfigError(f"the first losses are {first['ours']:.3f} and {first['theirs']:.3f}: not the same work")
    memory = [peak_memory(partial(next, losses), hardware.device) / 2**20 for losses in steps.values()]
    our_step, their_step = (timed(losses, options.steps) for losses in steps.values())
    our_seconds, seconds = interleave(our_step, their_step, options.rounds)
    tokens = cfg.trainer.batch_size * cfg.train_len * options.steps
    row = {
        "speed of a step / its": ratio(seconds, our_seconds),
        "tokens/s": f"{tokens / median(our_seconds):,.0f}",
        "MB of a step, its": f"{memory[0]:.0f}, {memory[1]:.0f}",
        f"speed at {TIMES}x / its": "",
    }
    if peer.encoding == "rope" and peer.build is not nanogpt:
        ours.materialise(hardware.device)
        ours.init_weights(cfg.seed)
        x, y = data.validation(longest, cfg.step_tokens).batch(0, max(1, cfg.trainer.batch_size // TIMES))
        x, y = x.to(hardware.device), y.to(hardware.device)
        of_ours = _reading(ours, hardware, partial(ours, x, targets=y))
        our_seconds, seconds = interleave(of_ours, _reading(theirs, hardware, partial(loss_of, x, y)), options.rounds)
        row[f"speed at {TIMES}x / its"] = ratio(seconds, our_seconds)
    return row


def _optimizer(net: Any, optim: Optim, device: str) -> torch.optim.Optimizer:
    """Return nanoGPT's own optimizer, or that of PyTorch which users of the others take, with our settings."""
    betas = (optim.beta1, optim.beta2)
    if hasattr(net, "configure_optimizers"):
        with contextlib.redirect_stdout(sys.stderr):
            return net.configure_optimizers(optim.weight_decay, optim.lr, betas, device)
    return torch.optim.AdamW(net.parameters(), optim.lr, betas, weight_decay=optim.weight_decay, fused=True)


def _reading(net: nn.Module, hardware: Hardware, loss: Callable[[], Tensor]) -> Callable[[], float]:
    """Return a call that computes a loss without gradients and returns the seconds; the first one is made here."""
    net.eval()

    def seconds() -> float:
        start = perf_counter()
        with torch.no_grad(), hardware.autocast():
            float(loss())  # waits for the device
        return perf_counter() - start

    seconds()
    return seconds
