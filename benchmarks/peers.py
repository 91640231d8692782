"""Training beside other programs: the same shape, the same first weights, the same batches, in turns.

A peer runs as its authors have it: its model, its optimizer and its loop, on batches that are ready in memory; we run
train.py, which makes its own. Each is in a process of its own, so that our settings of the allocator and of the matrix
products are not lent to it. Both losses have to agree.
"""

import importlib.util
import io
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data as data_sources
from benchmarks import training
from benchmarks.measure import Contender, Turn, ratio, take_turns
from benchmarks.report import Outcome, Table, progress
from benchmarks.training import Request, batches, check_same_work, described, machine_of, middle, network, trained
from conf.schema import Config, ConfigError
from data.base import Data
from model.gpt import GPT
from model.lit import LitGPT
from model.machine import Machine

TOLERANCE = 0.02  # of the losses: weight decay of positions and details of arithmetic are the authors' own
# One network in all programs: learned positions and the exact GELU, which nanoGPT has.
SAME = {"pe": "learned", "model.mlp": "gelu_exact"}


class Arguments(training.Arguments):
    nanogpt: str | None = None  # folder of a checkout
    transformers: bool = False  # the installed one: its GPT-2 in a bare loop
    compiled: bool = True  # also both sides compiled


def read(arguments: dict[str, str]) -> Request:
    """Keys other than those of `Arguments` are train.py's. Raises ConfigError."""
    args = training.parse_own(Arguments, arguments)
    if not args.nanogpt and not args.transformers:
        raise ConfigError("name a peer: nanogpt=FOLDER of a checkout, or transformers=true for the installed one")
    if args.nanogpt and not (Path(args.nanogpt) / "model.py").is_file():
        raise ConfigError(f"nanogpt={args.nanogpt} is no checkout of nanoGPT: it has no model.py")
    if args.transformers and importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers=true needs it installed: pip install transformers")
    cfg = training.configure(SAME | arguments, args.rounds, args.steps)
    check_shape(cfg)
    if cfg.trainer.precision == "bf16-true":
        raise ConfigError("trainer.precision=bf16-true: nanoGPT has fp32 weights; compare at 32 or bf16-mixed")
    return Request(args, machine_of(cfg).device, {"learned": cfg})


def check_shape(cfg: Config) -> None:
    """Raise ConfigError for what GPT-2 has not."""
    m = cfg.model
    wanted = {
        "pe": (cfg.pe["name"], "learned"),
        "model.norm": (m.norm, "layernorm"),
        "model.mlp": (m.mlp, "gelu_exact"),
        "model.n_kv_head": (m.kv_heads, m.n_head),
        "model.head_dim": (m.head_width * m.n_head, m.dim),
        "model.hidden_dim": (m.hidden, 4 * m.dim),
        "model.bias": (m.bias, False),
        "model.qk_norm": (m.qk_norm, False),
        "model.tie_embeddings": (m.tie_embeddings, True),
        "model.dropout": (m.dropout, 0.0),
        "model.norm_eps": (m.norm_eps, 1e-5),
        "trainer.accumulate": (cfg.trainer.accumulate, 1),
    }
    for key, (found, needed) in wanted.items():
        if found != needed:
            raise ConfigError(f"{key}: peers train the shape of GPT-2 without biases, which this would change; drop it")


def gpt2_names(net: GPT) -> dict[str, Tensor]:
    """The weights of a network of `check_shape`'s kind by GPT-2's names, matrices [out, in]."""
    (positions,) = net.positions.parameters()
    found: dict[str, Any] = {
        "transformer.wte.weight": net.embedding.weight,
        "transformer.wpe.weight": positions,
        "transformer.ln_f.weight": net.norm.weight,
        "lm_head.weight": net.head.weight,
    }
    names = {
        "attn_norm": "ln_1",
        "attn.qkv": "attn.c_attn",
        "attn.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for i in range(net.cfg.n_layer):
        for ours, theirs in names.items():
            found[f"transformer.h.{i}.{theirs}.weight"] = net.get_parameter(f"blocks.{i}.{ours}.weight")
    return {name: weight.detach() for name, weight in found.items()}


def nanogpt_model(folder: str, net: GPT) -> Any:
    """nanoGPT's network, with the weights of ours."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder) / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    cfg = net.cfg
    with redirect_stdout(io.StringIO()):
        spec.loader.exec_module(module)
        peer = module.GPT(
            module.GPTConfig(
                block_size=net.train_len, vocab_size=cfg.padded(net.vocab_size), n_layer=cfg.n_layer,
                n_head=cfg.n_head, n_embd=cfg.dim, dropout=0.0, bias=False,
            )
        )  # fmt: skip
    peer.load_state_dict(gpt2_names(net))
    return peer


def transformers_model(net: GPT) -> Any:
    """The GPT-2 of transformers, with the weights of ours and biases of zero."""
    from transformers import GPT2Config, GPT2LMHeadModel

    cfg = net.cfg
    peer = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=cfg.padded(net.vocab_size), n_positions=net.train_len, n_embd=cfg.dim, n_layer=cfg.n_layer,
            n_head=cfg.n_head, activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # its matrices are [in, out]
    weights = {name: w.T if name.endswith(turned) else w for name, w in gpt2_names(net).items()}
    left = peer.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys
    assert all(name.endswith("bias") for name in left.missing_keys)
    return peer


def nanogpt(folder: str, compiled: bool, cfg: Config, data: Data, machine: Machine, turn: Turn) -> None:
    """A contender: nanoGPT's train.py, without what it does between its steps."""
    peer = nanogpt_model(folder, network(cfg, data)).to(machine.device)
    with redirect_stdout(io.StringIO()):
        o = cfg.optim
        optimizer = peer.configure_optimizers(o.weight_decay, o.lr, (o.beta1, o.beta2), machine.device)
    call = torch.compile(peer) if compiled else peer
    on_cpu = machine.device == "cpu"  # where it neither uses autocast nor has a GradScaler at work
    mixed = nullcontext() if on_cpu else torch.autocast(machine.device, torch.bfloat16)
    _train(peer, optimizer, lambda x, y: call(x, y)[1], mixed, cfg, data, machine, turn)


def transformers(compiled: bool, cfg: Config, data: Data, machine: Machine, turn: Turn) -> None:
    """A contender: transformers' GPT-2 with AdamW, fused as its Trainer has it, in a bare loop."""
    peer = transformers_model(network(cfg, data)).to(machine.device).train()
    o = cfg.optim
    decayed = [p for p in peer.parameters() if p.ndim >= 2]
    groups = [
        {"params": decayed, "weight_decay": o.weight_decay},
        {"params": [p for p in peer.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=True)
    call = torch.compile(peer) if compiled else peer

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call(x, use_cache=False).logits.flatten(0, 1).float(), y.flatten())

    mixed = torch.autocast(machine.device, torch.bfloat16, enabled=machine.precision == "bf16-mixed")
    _train(peer, optimizer, loss, mixed, cfg, data, machine, turn)


def _train(
    peer: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    mixed: Any,
    cfg: Config,
    data: Data,
    machine: Machine,
    turn: Turn,
) -> None:
    warnings.filterwarnings("ignore")
    data.prepare()
    loader = batches(cfg, data, machine)
    ready = [tuple(part.to(machine.device) for part in next(loader)) for _ in range(cfg.trainer.max_steps)]
    schedule = LitGPT(network(cfg, data), seed=0, max_steps=cfg.trainer.max_steps, **cfg.optim.model_dump()).schedule
    every, losses = cfg.trainer.log_every, torch.zeros((), device=machine.device)
    for step, (x, y) in enumerate(ready, 1):
        for group in optimizer.param_groups:
            group["lr"] = cfg.optim.lr * schedule(step - 1)
        with mixed:
            loss = loss_of(x, y)
        loss.backward()
        if cfg.optim.grad_clip:
            torch.nn.utils.clip_grad_norm_(peer.parameters(), cfg.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses += loss.detach()
        if step == 1 or step % every == 0:
            turn(step, loss=float(losses) / (1 if step == 1 else min(every, step - 1)))
            losses = torch.zeros_like(losses)


def measure(request: Request) -> Outcome:
    args, cfg = request.args, request.configs["learned"]
    assert isinstance(args, Arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    data = data_sources.build(cfg.data)
    data.prepare(progress=True)
    machine = replace(machine_of(cfg), compile=False)
    modes = {"": False, ", compiled": True} if args.compiled else {"": False}
    contenders: dict[str, Contender] = {}
    for label, compiled in modes.items():
        contenders["train.py" + label] = partial(trained, cfg, data, replace(machine, compile=compiled))
        if args.nanogpt:
            contenders["nanoGPT" + label] = partial(nanogpt, args.nanogpt, compiled, cfg, data, machine)
        if args.transformers:
            contenders["transformers" + label] = partial(transformers, compiled, cfg, data, machine)
    progress(f"in turns: {', '.join(contenders)}")
    courses = take_turns(contenders, rounds=args.rounds, threads=args.threads)
    ours = {label: courses["train.py" + label] for label in modes}
    for course in courses.values():
        check_same_work(course, ours[""], TOLERANCE)
    rows = []
    for name, course in courses.items():
        row: dict[str, Any] = {"": name}
        for label, own in ours.items():
            found = ratio(course.per_step(args.clock), own.per_step(args.clock))
            row[f"train.py{label} / it"] = found.median
            row[f"range{label}"] = f"{found.low:.2f} to {found.high:.2f}"
        row["tokens/s"] = cfg.trainer.batch_size * cfg.train_len / middle(course, args.clock)
        row["peak memory, MB"] = course.peak_memory / 2**20
        row["last loss"] = course.pieces[-1].facts["loss"]
        rows.append(row)
    m, t = cfg.model, cfg.trainer
    notes = [
        f"{m.n_layer} layers x {m.dim}, {m.n_head} heads, batch {t.batch_size} x {cfg.train_len}; "
        f"ours: {machine.describe()[0]}",
        f"{args.clock} time, medians of {args.rounds} rounds of {args.steps} steps, in turns. Above 1, "
        f"train.py trains more tokens a second.",
    ]
    return Outcome([Table("Tokens a second of train.py as a ratio to each", rows)], [described(courses)], notes)
