"""Search the divisors of RoPE's frequencies with which a trained run reads longer text: `pe.long_factor` of LongRoPE.

python scripts/search_longrope.py run=runs/rope-code scale=8
python scripts/search_longrope.py run=runs/rope-code scale=8 population=32 generations=30 texts=64

An evolution as in arXiv 2402.13753: it starts from the divisors of linear, ntk and yarn, and keeps the best of their
mutations. Divisors never fall from one pair of channels to the next. All are read with longrope's sharper logits.

What is minimised is the loss on far copies, tokens after words that last occurred more than train_len tokens ago, since
the loss on all tokens is mostly decided by near ones. The search reads windows of the training data. The run's
evaluation texts, which it never sees, are the control. Nothing is written.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

import ropewalk
from conf.schema import ConfigError, Count, Section
from data.base import Data, EvalSet
from model import serialization
from model.gpt import GPT
from model.position.rotary import Rotary
from model.position.scaled_rotary import ScaledRotary
from ropewalk.app import init_from
from ropewalk.app.cli import program
from ropewalk.app.run_dir import check_identity
from ropewalk.app.trained import Options, variants
from ropewalk.evaluation.measures.cut import nats_of_cut
from ropewalk.evaluation.measures.far_copies import match_tokens, repeats
from ropewalk.evaluation.scoring import Scorer
from ropewalk.evaluation.statistics import Sample, by_document, difference, estimate
from ropewalk.training.hardware import Hardware, tune

STARTS = ("ntk", "linear", "yarn")  # the first is what longrope does without a list, and what is compared with
LARGEST = 1.25  # divisor, as a multiple of the scale
MUTATED = 0.3  # share of the divisors that a mutation changes
STEP = 0.25  # standard deviation of their change, of the logarithm
DIGITS = 3  # after the point, of a divisor
PARENTS = 4  # the best lists, of which the next generation is made

Factors = tuple[float, ...]  # rotary_dim / 2 divisors, that of the fastest pair first


class Arguments(Section):
    run: str
    scale: float = Field(gt=1, allow_inf_nan=False)
    texts: Count
    population: Count
    generations: Count
    seed: int = Field(ge=0, lt=2**63)
    device: str
    cache_dir: str


class Texts(NamedTuple):
    """Texts, and which targets are far copies."""

    part: EvalSet
    groups: Tensor  # int64 [n, T]: 0 far copies, -1 others


@program("search_longrope", Arguments)
def main(args: Arguments) -> None:
    path = init_from.opened(args.run, args.cache_dir)
    cfg = init_from.evaluation(path, None)
    trained = serialization.describe(path)
    options = {name: variants(trained, [{"pe": name, "scale": args.scale}])[0] for name in ("longrope", *STARTS)}
    length = round(args.scale * options["longrope"]["original_len"])
    hardware = Hardware.resolve(accelerator=args.device, precision=cfg.trainer.precision)
    tune(hardware.device)
    model = ropewalk.load(path, device=hardware.device, cache_dir=args.cache_dir)
    net, data = model.net, model.data
    net.to(torch.bfloat16 if hardware.precision == "bf16-true" else torch.float32)
    data.prepare(progress=True)
    check_identity(path, data.identity())
    unseen = data.fully_scored(length, cfg.eval.sequences)
    if unseen is None:
        raise ConfigError(f"run={args.run} was trained on a task, where nothing is a copy: give one trained on text")
    inputs, targets = data.train_batch(range(args.texts), length, args.seed)
    windows = EvalSet("search", length, args.texts, lambda start, stop: (inputs[start:stop], targets[start:stop]))
    searched = far_copies_of(windows, data, cfg.train_len)
    control = far_copies_of(unseen, data, cfg.train_len)
    n_far = int((searched.groups == 0).sum())
    if not n_far:
        raise ConfigError(f"no far copies in {args.texts} texts of {length} tokens: raise texts or scale")
    print(f"{args.texts} windows of {length:,} tokens of the training data, with {n_far:,} far copies")

    def sample(nats: np.ndarray, texts: Texts) -> Sample:
        tokens = (texts.groups == 0).sum(dim=1).numpy()
        return by_document(Sample(nats.T / math.log(2), tokens), texts.part.documents)

    def read(factors: Factors, texts: Texts) -> Sample:
        """Return the bits of the far copies of each text, read with these divisors."""
        reader = read_as(net, options["longrope"] | {"long_factor": list(factors)})
        with reader.at_scale(args.scale):
            sums = Scorer(reader, data.token_bytes, hardware.autocast)(texts.part, texts.groups, 1)
        return sample(sums.nats, texts)

    def loss(factors: Factors) -> float:
        return estimate(read(factors, searched)).value

    lists = {name: start(read_as(net, options[name]), args.scale, length) for name in STARTS}
    rng = np.random.default_rng(args.seed)
    lists["found"] = search(loss, list(lists.values()), args.population, args.generations, LARGEST * args.scale, rng)

    score = Scorer(net, data.token_bytes, hardware.autocast)
    cut = sample(nats_of_cut(score, control.part, control.groups, 1, cfg.train_len), control)
    of_first = read(lists[STARTS[0]], control)
    heads = ("search", "evaluation", "gain over the cut text", f"gain over {STARTS[0]}")
    print("\n{:18} {:>8} {:>11} {:>24} {:>18}".format("bits per far copy", *heads))
    for name, factors in lists.items():
        own = read(factors, control)
        gains = [difference(other, own) for other in (cut, of_first)]
        over_cut, over_first = (f"{gain.value:+.4f} ± {gain.half:.4f}" for gain in gains)
        print(f"{name:18} {loss(factors):8.4f} {estimate(own).value:11.4f} {over_cut:>24} {over_first:>18}")
    found = ",".join(f"{factor:g}" for factor in lists["found"])
    print(f"\npe=longrope pe.scale={args.scale:g} 'pe.long_factor=[{found}]'")


def far_copies_of(part: EvalSet, data: Data, train_len: int) -> Texts:
    """Find the targets whose words last occurred more than `train_len` tokens before them, and not nearer."""
    inputs, targets = part.batch(0, part.n)
    tokens = torch.cat([inputs[:, :1], targets], dim=1).numpy()
    n = match_tokens(data, part)
    distances = np.stack([repeats(row, n)[0][1:] for row in tokens])
    return Texts(part, torch.from_numpy(np.where(distances > train_len, 0, -1)))


def read_as(net: GPT, pe: Options) -> GPT:
    """Return a network with the weights of `net`, not copied, and the encoding `pe`."""
    with torch.device("meta"):
        reader = GPT(net.cfg, pe, vocab_size=net.vocab_size, train_len=net.train_len)
    reader.load_state_dict(net.state_dict(), assign=True)
    reader.document_end = net.document_end
    return reader.eval()


def start(net: GPT, scale: float, length: int) -> Factors:
    """Return the divisors with which the scaling of `net` reads `length` tokens."""
    encoding = next(pe for pe in net.encodings if isinstance(pe, ScaledRotary))
    plain = Rotary.frequencies(encoding, length)
    return tuple((plain / encoding.at(plain, scale, length)).tolist())


def search(
    loss: Callable[[Factors], float], starts: Sequence[Factors], population: int, generations: int, largest: float,
    rng: np.random.Generator,
) -> Factors:  # fmt: skip
    """Return the best divisors that an evolution from `starts` finds, non-decreasing and between 1 and `largest`."""
    losses = {factors: loss(factors) for factors in starts}
    for generation in range(1, generations + 1):
        parents = sorted(losses, key=losses.__getitem__)[:PARENTS]
        for _ in range(population):
            child = mutated(parents, largest, rng)
            if child not in losses:
                losses[child] = loss(child)
        print(f"generation {generation}: {min(losses.values()):.4f} bits per far copy", flush=True)
    return min(losses, key=losses.__getitem__)


def mutated(parents: Sequence[Factors], largest: float, rng: np.random.Generator) -> Factors:
    """Mix two of the `parents`, change some divisors by chance, and sort."""
    one, other = (np.log(parents[i]) for i in rng.integers(len(parents), size=2))
    child = np.where(rng.random(len(one)) < 0.5, one, other)
    child += STEP * rng.standard_normal(len(one)) * (rng.random(len(one)) < MUTATED)
    return tuple(np.sort(np.exp(child).clip(1, largest)).round(DIGITS).tolist())


if __name__ == "__main__":
    main()
