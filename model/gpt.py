"""The network: a decoder-only transformer, its initialisation and its counts."""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import GPTConfig, parse
from model import position
from model.attention import Context, KVCache, Positions, exactly, recomputed
from model.documents import (
    Documents,
    DocumentsInPlace,
    PackedContext,
    contexts_in_place,
    find_documents,
    packed_contexts,
)
from model.loss import IGNORE_INDEX, CrossEntropy
from model.position import PositionEncoding, Shape
from model.position.layer import attend, cached_tokens, init_parameters, make_context, reads_in_place
from ropewalk.training.context_parallel import ContextParallel, SplitContext

R = TypeVar("R")
AnyContext = Context | PackedContext | SplitContext
# The most logits that are held at once, 64 MiB in fp32, unless a single position of the batch has more.
MAX_LOGITS = 2**24


def parse_config(values: Any) -> GPTConfig:
    """Return the architecture that a file describes.

    Raises:
        ValueError: names the first field that is wrong.
    """
    return parse(GPTConfig, values)


def _norm(cfg: GPTConfig) -> nn.Module:
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
    return nn.LayerNorm(cfg.dim, eps=cfg.norm_eps, bias=cfg.bias is True)


def _earlier(owner: nn.Module, x: Tensor, n: int, ctx: AnyContext, cache: KVCache | None) -> list[Tensor]:
    """What `owner` reads, `x` [B, T, C], and the same 1 to `n` tokens earlier, each [B, T, C].

    Tokens before the text, or before a token's document, are zero.
    """
    if cache is None:
        padded = F.pad(x, (0, 0, n, 0))  # [B, n + T, C]
    else:
        padded = cache.with_recent(owner, x, n)
    shifted = []
    for k in range(n + 1):
        earlier = padded[:, n - k : padded.size(1) - k]  # [B, T, C], the tokens t - k
        if isinstance(ctx, PackedContext):
            earlier = earlier * (ctx.documents.pos >= k)[..., None]
        elif isinstance(ctx, Context) and ctx.places is not None:
            earlier = earlier * (ctx.places.pos >= k)[..., None]
        shifted.append(earlier)
    return shifted


class ShortConv(nn.Module):
    """A short convolution of each channel over the newest tokens, added to its input: x_t + sum of w_k x_{t-k}.

    A Canon layer (arXiv 2512.17351).
    """

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, tokens))

    def forward(self, x: Tensor, ctx: AnyContext, cache: KVCache | None) -> Tensor:
        shifted = _earlier(self, x, self.weight.size(1) - 1, ctx, cache)
        by_distance = self.weight.to(x.dtype).unbind(1)  # [C] each
        out = x  # [B, T, C]
        for weight, earlier in zip(by_distance, shifted, strict=True):
            out = out + weight * earlier
        return out


def _conv(cfg: GPTConfig, place: str, width: int) -> ShortConv | None:
    return ShortConv(width, cfg.conv) if cfg.conv and place in cfg.conv_at else None


class Attention(nn.Module):
    """One layer's attention: projections, norms of queries and keys, cache, sinks, gate. The encoding does the rest."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.head_counts = [cfg.n_head, cfg.kv_heads, cfg.kv_heads]  # of q, k and v
        self.qkv = nn.Linear(cfg.dim, sum(self.head_counts) * cfg.head_width, bias=cfg.bias is not False)
        self.out = nn.Linear(cfg.n_head * cfg.head_width, cfg.dim, bias=cfg.bias in (True, "attention"))
        # Each head is normed by itself, as in Gemma 3; or all heads of a token together, as in OLMo 2.
        self.norm_per_head = cfg.qk_norm != "projection"

        def norm(heads: int) -> nn.Module:
            if not cfg.qk_norm:
                return nn.Identity()
            normed_heads = 1 if self.norm_per_head else heads
            return nn.RMSNorm(normed_heads * cfg.head_width, eps=cfg.norm_eps)

        self.q_norm = norm(cfg.n_head)
        self.k_norm = norm(cfg.kv_heads)
        self.sinks = nn.Parameter(torch.zeros(cfg.n_head)) if cfg.sinks else None
        # A number for each head, or for each of its channels, that multiplies what it read (arXiv 2505.06708).
        self.gate = None
        if cfg.gate != "none":
            gates = cfg.n_head if cfg.gate == "head" else cfg.n_head * cfg.head_width
            self.gate = nn.Linear(cfg.dim, gates, bias=cfg.bias is not False)
        self.conv = _conv(cfg, "A", cfg.dim)
        self.qkv_conv = _conv(cfg, "B", self.qkv.out_features)
        self.key_offset = cfg.key_offset

    def forward(self, x: Tensor, pe: PositionEncoding, ctx: AnyContext, cache: KVCache | None, layer: int) -> Tensor:
        if self.conv is not None:
            x = self.conv(x, ctx, cache)
        qkv = self.qkv(x)  # [B, T, (H + 2 Hkv) D]
        if self.qkv_conv is not None:
            qkv = self.qkv_conv(qkv, ctx, cache)
        q, k, v = self.split(qkv)
        if self.key_offset:
            k = self.with_offset(k, ctx, cache)
        state = pe.state(x)
        if not isinstance(ctx, Context):
            heads = ctx.attend(pe, q, k, v, state, self.sinks)  # [B, T, H, D]
            return self.output(heads, x)
        ctx = replace(ctx, sinks=self.sinks)
        if cache is not None:
            # The cache holds raw keys: a rotation may depend on the length of the text, which grows.
            cached = cache.append(layer, cached_tokens(pe), k=k, v=v, **state)
            k = cached["k"]
            v = cached["v"]
            state = {name: cached[name] for name in state}
            # With a window the cache has dropped the oldest keys, and their positions go with them.
            ctx = replace(ctx, pos_k=ctx.pos_k[-k.size(1) :])
        q = q.transpose(1, 2)  # [B, H, Tq, D]
        k = k.transpose(1, 2)  # [B, Hkv, Tk, D]
        v = v.transpose(1, 2)  # [B, Hkv, Tk, D]
        heads = attend(pe, q, k, v, state, ctx).transpose(1, 2)  # [B, T, H, D]
        return self.output(heads, x)

    def with_offset(self, k: Tensor, ctx: AnyContext, cache: KVCache | None) -> Tensor:
        """Keys `k` [B, T, Hkv, D] of which the second half of the channels is that of the token before.

        The partial key offset of github.com/KellerJordan/modded-nanogpt, where the first token keeps its own half.
        """
        own, offset = k.chunk(2, dim=-1)  # [B, T, Hkv, D / 2] each
        _, before = _earlier(self, offset.flatten(-2), 1, ctx, cache)
        return torch.cat((own, before.view_as(offset)), dim=-1)

    def output(self, heads: Tensor, x: Tensor) -> Tensor:
        """Output [B, T, C] of what the heads read, [B, T, H, D], from the layer's input `x` [B, T, C]."""
        if self.gate is not None:
            gates = self.gate(x).sigmoid().unflatten(-1, (heads.size(-2), -1))  # [B, T, H, 1 or D]
            heads = heads * gates.to(heads.dtype)
        return self.out(heads.flatten(-2))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, Hkv, D] of the projections `qkv` [B, T, (H + 2 Hkv) D]."""
        qkv = qkv.unflatten(-1, (sum(self.head_counts), -1))  # [B, T, H + 2 Hkv, D]
        q, k, v = qkv.split(self.head_counts, dim=2)  # [B, T, H, D], twice [B, T, Hkv, D]
        if self.norm_per_head:
            q = self.q_norm(q)
            k = self.k_norm(k)
        else:
            q = self.q_norm(q.flatten(-2)).view_as(q)  # normed as [B, T, H D]
            k = self.k_norm(k.flatten(-2)).view_as(k)
        # On CUDA autocast computes norms in fp32. Without the casts all of attention would follow in fp32.
        return q.to(v.dtype), k.to(v.dtype), v


class MLP(nn.Module):
    """One layer's feed-forward network, gated or not."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.gated = cfg.gated
        if cfg.mlp == "swiglu":
            self.activation: nn.Module = nn.SiLU()
        else:
            self.activation = nn.GELU("none" if cfg.mlp == "gelu_exact" else "tanh")
        self.up = nn.Linear(cfg.dim, cfg.hidden * (2 if self.gated else 1), bias=cfg.bias is True)
        self.down = nn.Linear(cfg.hidden, cfg.dim, bias=cfg.bias is True)
        self.conv = _conv(cfg, "C", cfg.dim)
        self.up_conv = _conv(cfg, "D", self.up.out_features)

    def forward(self, x: Tensor, ctx: AnyContext, cache: KVCache | None) -> Tensor:
        if self.conv is not None:
            x = self.conv(x, ctx, cache)
        x = self.up(x)
        if self.up_conv is not None:
            x = self.up_conv(x, ctx, cache)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)  # [B, T, hidden] each
            return self.down(self.activation(gate) * x)
        return self.down(self.activation(x))


class Block(nn.Module):
    """One layer: attention and feed-forward network, each added to the residual stream."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        before = cfg.norm_at != "after"
        after = cfg.norm_at != "before"
        self.parallel = cfg.parallel  # attention and feed-forward network read the same normed input

        def norm_if(wanted: bool) -> nn.Module:
            return _norm(cfg) if wanted else nn.Identity()

        self.attn_norm = norm_if(before)
        self.attn = Attention(cfg)
        self.mlp_norm = norm_if(before and not cfg.parallel)
        self.mlp = MLP(cfg)
        self.attn_post_norm = norm_if(after)
        self.mlp_post_norm = norm_if(after)
        self.dropout = nn.Dropout(cfg.dropout)
        self.position: PositionEncoding | None = None  # the layer's encoding, unless several layers share it: see GPT

    def forward(self, x: Tensor, pe: PositionEncoding, ctx: AnyContext, cache: KVCache | None, layer: int) -> Tensor:
        # Norms that `norm_at` leaves out are identities, so one formula serves all architectures.
        h = self.attn_norm(x)
        x = x + self.dropout(self.attn_post_norm(self.attn(h, pe, ctx, cache, layer)))
        if not self.parallel:
            h = self.mlp_norm(x)
        return x + self.dropout(self.mlp_post_norm(self.mlp(h, ctx, cache)))


class GPT(nn.Module):
    """Decoder-only transformer. `encodings` holds the position encoding of each layer; layers may share one.

    Args:
        pe: configuration of the position encoding, see `model.position.build_encodings`.
        vocab_size: tokens of the tokenizer; the embedding may be padded beyond it.
        train_len: tokens of a training sequence.
        seed: of the initial weights.
    """

    def __init__(
        self, cfg: GPTConfig, pe: Mapping[str, Any], *, vocab_size: int, train_len: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.vocab_size = vocab_size
        self.train_len = train_len
        # Set by training: whether the backward pass computes the activations of each block again from its input; the
        # token that ends a document, beyond which no attention looks back (None: documents are not told apart); the
        # ranks that share each text (None: this one reads it alone); and whether attention may use `model.kernels`.
        self.checkpointing = False
        self.document_end: int | None = None
        self.context_parallel: ContextParallel | None = None
        self.kernels = False
        self.encodings = position.build_encodings(pe, Shape.of(cfg, train_len))
        for encoding in self.encodings:
            if cfg.sinks and not encoding.has_softmax:
                lacking = type(encoding).__name__
                raise ValueError(f"model.sinks=true takes part in a softmax, which {lacking} lacks: set it to false")

        # Padded to a multiple of `vocab_multiple`, since GPUs multiply matrices of round sizes faster.
        rows = math.ceil(vocab_size / cfg.vocab_multiple) * cfg.vocab_multiple
        self.embedding = nn.Embedding(rows, cfg.dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in self.encodings)
        # `encodings` is a plain list, which registers no parameters. An encoding of one layer is registered as the
        # `position` of its block, one that several layers share here in `positions`: under each name once, so that
        # a state dict has no tensor twice. Both names are part of the file format.
        self.positions = nn.ModuleList(pe for pe in self.distinct_encodings if self.encodings.count(pe) > 1)
        for block, encoding in zip(self.blocks, self.encodings, strict=True):
            if encoding not in self.positions:
                block.position = encoding
        self.norm = _norm(cfg)
        self.head = nn.Linear(cfg.dim, rows, bias=False)
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight
        # On "meta" tensors have no values: the caller loads a state dict, or calls `materialise` and `init_weights`.
        if not self.embedding.weight.is_meta:
            self.init_weights(seed)

    def materialise(self, device: torch.device | str) -> None:
        """Give the parameters of a network on "meta" memory on another device; they have no values yet."""
        self.to_empty(device=device)
        if self.cfg.tie_embeddings:
            self.head.weight = self.embedding.weight  # `to_empty` unties them

    @torch.no_grad()
    def init_weights(self, seed: int, assign: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Fill every parameter in place with its initial values.

        Args:
            assign: called with each parameter and its initial values, which are whole, in fp32 and on the CPU.
        """

        # Every parameter draws from a generator of its own, seeded by (seed, name), and never from the global one. So
        # another encoding, or one layer more, leaves the other initial tensors bit for bit as they were: comparisons
        # of encodings are paired, and their statistics rely on it.
        def generator(name: str) -> torch.Generator:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

        # GPT-2's rule: each layer adds to the residual stream twice. With this std the variance of the sum does not
        # grow with the number of layers.
        residual_std = self.cfg.init_std / math.sqrt(2 * self.cfg.n_layer)
        # Encodings initialise their own parameters, below.
        encoding_ids = {id(p) for pe in self.encodings for p in pe.parameters()}
        for name, p in self.named_parameters():
            if id(p) in encoding_ids:
                continue
            values = torch.zeros(p.shape)  # of one parameter at a time
            if name.endswith("conv.weight"):  # as PyTorch's Conv1d: uniform up to 1 / sqrt(tokens)
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator(name))
            elif name.endswith(("attn.out.weight", "mlp.down.weight")):
                nn.init.normal_(values, 0.0, residual_std, generator(name))
            elif p.ndim > 1:
                nn.init.normal_(values, 0.0, self.cfg.init_std, generator(name))
            elif not name.endswith(("bias", "sinks")):  # norms start as the identity
                nn.init.ones_(values)
            assign(p, values)
        for pe in self.distinct_encodings:
            first_layer = self.encodings.index(pe)
            on_cpu = copy.deepcopy(pe).to("cpu", torch.float32)
            init_parameters(on_cpu, generator(f"positions.{first_layer}"))
            for p, values in zip(pe.parameters(), on_cpu.parameters(), strict=True):
                assign(p, values)

    @property
    def distinct_encodings(self) -> list[PositionEncoding]:
        """Each instance in `encodings` once."""
        return list(dict.fromkeys(self.encodings))

    @property
    def scales(self) -> tuple[float, ...]:
        """The scales to evaluate at; the first is the one it trains at. (1.0,) without a scaled encoding."""
        for pe in self.encodings:
            if len(pe.scales) > 1:
                return pe.scales
        return self.encodings[0].scales

    @property
    def max_len(self) -> int | None:
        """Longest text, in tokens, that is defined at the active scale; None: no limit."""
        limits = [pe.max_len for pe in self.encodings if pe.max_len is not None]
        return min(limits, default=None)

    @property
    def family(self) -> str:
        """Name of the networks that read each other's weights without training: those of one family."""
        families = []
        for pe in self.distinct_encodings:
            learned = {"ssmax": ", SSMax", "head": ", a factor for each head"}.get(str(pe.temperature), "")
            families.append(pe.family + learned)
        return ", ".join(dict.fromkeys(families))

    def scale_for(self, length: int) -> float:
        """The scale to read `length` tokens at: the largest beyond train_len, else the one it trains at."""
        return max(self.scales) if length > self.train_len else self.scales[0]

    @contextmanager
    def at_scale(self, scale: float) -> Iterator[None]:
        """Let the scaled encodings use `scale`, one of `scales`, or their own scale at the same index.

        An encoding with a window of at most train_len keeps its scale: it has met every distance in training.
        """
        scaled = []
        for pe in self.distinct_encodings:
            window_was_filled = pe.window is not None and pe.window <= self.train_len
            if len(pe.scales) > 1 and not window_was_filled:
                scaled.append(pe)
        old_scales = [pe.active_scale for pe in scaled]
        # In a pattern of different scalings the network's scales are those of its first scaled layer. The others follow
        # by index: first the scale that they train at, then the one that they read longer text at.
        index = self.scales.index(scale) if scale in self.scales else len(self.scales)
        try:
            for pe in scaled:
                pe.active_scale = pe.scales[index] if index < len(pe.scales) else scale
            yield
        finally:
            for pe, old_scale in zip(scaled, old_scales, strict=True):
                pe.active_scale = old_scale

    @contextmanager
    def with_window(self, longest: int | None) -> Iterator[None]:
        """Shorten windows to `longest` tokens inside the context; None: no limit. Layers without a window keep none."""
        windows = {pe: pe.window for pe in self.distinct_encodings}

        try:
            for pe, window in windows.items():
                if window is not None and longest is not None:
                    pe.window = min(window, longest)
            yield
        finally:
            for pe, window in windows.items():
                pe.window = window

    @contextmanager
    def with_encodings(self, encodings: list[PositionEncoding]) -> Iterator[None]:
        """Let `encodings`, one for each layer, replace the network's own inside the context, with its parameters.

        A training stage uses it: the same weights, with options such as train_len that differ.
        """
        # Only the list is exchanged. The registered modules stay, so optimizer and state dict notice nothing; the
        # stand-ins hold the very same parameters, which are trained as before.
        own_encodings = self.encodings
        for own, stand_in in zip(own_encodings, encodings, strict=True):
            for name, parameter in own.named_parameters():
                setattr(stand_in, name, parameter)
        self.encodings = encodings
        try:
            yield
        finally:
            self.encodings = own_encodings

    def hidden_states(
        self, idx: Tensor, cache: KVCache | None = None, *, positions: Positions | None = None,
        documents: Documents | DocumentsInPlace | None = None,
    ) -> Tensor:  # fmt: skip
        """Final hidden states [B, T, C] of token ids `idx` [B, T], which continue the text in `cache`.

        With `context_parallel` those of this rank's part of the text, unless there is a cache.

        Args:
            positions: where the tokens, those in `cache` included, stand in a longer text whose other tokens are left
                out; and its length.
            documents: what the method `documents` found in `idx`: each is read as if it were alone. Not with `cache` or
                `positions`.
        """
        # Each distinct encoding gets one context before the layers run. So tables, such as the angles of a rotation,
        # are computed once rather than in every layer, and are not part of what checkpointing computes again.
        contexts: dict[PositionEncoding, Any] = {}
        if documents is not None:
            assert cache is None
            assert positions is None
        if isinstance(documents, DocumentsInPlace):
            new_pos, contexts = contexts_in_place(self.distinct_encodings, idx, documents.end)
        elif documents is not None:
            pos, contexts = packed_contexts(self.distinct_encodings, documents, idx.device, kernels=self.kernels)
            new_pos = pos  # [B, T]
        elif self.context_parallel is not None and cache is None:
            assert positions is None
            new_pos, contexts = self.context_parallel.contexts(
                self.distinct_encodings, idx.size(1), idx.device, recompute=not self.checkpointing
            )
            idx = self.context_parallel.own(idx)
        else:
            n_new = idx.size(1)
            if positions is not None:
                pos, length = positions
            else:
                length = n_new if cache is None else cache.length + n_new
                pos = torch.arange(length, device=idx.device)  # of the cached tokens too
            for pe in self.distinct_encodings:
                contexts[pe] = make_context(pe, pos, n_new, length, kernels=self.kernels)
            new_pos = pos[-n_new:]  # [T]

        x = self.embedding(idx)  # [B, T, C]
        for pe in contexts:
            x = pe.embed(x, new_pos)
        x = self.dropout(x)
        for layer, (block, pe) in enumerate(zip(self.blocks, self.encodings, strict=True)):
            run = recomputed(block) if self.checkpointing else block
            x = run(x, pe, contexts[pe], cache, layer)
        return self.norm(x)

    def forward(
        self, idx: Tensor, cache: KVCache | None = None, *, positions: Positions | None = None,
        documents: Documents | DocumentsInPlace | None = None, targets: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [B, T, padded vocabulary] of token ids `idx` int64 [B, T], which continue the text in `cache`.

        With `targets` int64 [B, T] it returns the mean cross-entropy in nats instead, over all targets but
        IGNORE_INDEX. With `context_parallel` it is the mean over the ranks that is.
        """
        hidden = self.hidden_states(idx, cache, positions=positions, documents=documents)
        return self.head(hidden) if targets is None else self.loss(hidden, targets)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats that `forward` returns, of hidden states [B, T, C] and targets [B, T]."""

        def nats(logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

        n_targets = (targets != IGNORE_INDEX).sum()
        if self.context_parallel is not None:
            # A rank may have no target of its own. The mean over the ranks is the mean over all targets.
            targets = self.context_parallel.own(targets, IGNORE_INDEX)
            n_targets = n_targets / self.context_parallel.size
        # A compiler fuses the passes over the logits by itself.
        if self.checkpointing or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            total = torch.stack(self.in_pieces(nats, hidden, targets)).sum()
        else:
            total = CrossEntropy.apply(self.head(hidden).flatten(0, 1), targets.flatten(), self.vocab_size)
        return total / n_targets

    def compile_parts(self, *, graphs: bool = False) -> None:
        """Compile the blocks, and the loss apart: layers of one kind share a graph, whatever their number.

        Each length has a graph of its own. Wrap evaluations, which need none, in
        `ropewalk.training.sharding.evaluating`.

        Args:
            graphs: record the launches of kernels as CUDA graphs, each of which a GPU then starts at once. What they
                return is overwritten after `torch.compiler.cudagraph_mark_step_begin`.
        """
        mode = "reduce-overhead" if graphs else None
        for block in self.blocks:
            block.compile(dynamic=False, mode=mode)
        self.loss = torch.compile(self.loss, dynamic=False, mode=mode)  # type: ignore[method-assign]

    def in_pieces(self, function: Callable[[Tensor, Tensor], R], hidden: Tensor, targets: Tensor) -> list[R]:
        """Call `function`(logits fp32 [B, t, vocabulary], targets [B, t]) on pieces of the T positions, in order.

        A piece has at most MAX_LOGITS logits, or one position. Where gradients are wanted without `checkpointing`, all
        positions are one piece.

        Args:
            hidden: what `hidden_states` returned, [B, T, C].
            targets: [B, T].
        """

        def apply(hidden: Tensor, targets: Tensor) -> R:
            logits = exactly(self.head(hidden)[..., : self.vocab_size])  # without the padding of the vocabulary
            return function(logits, targets)

        # Logits are the largest tensor of a small network. In pieces they never exist all at once: an evaluation drops
        # each piece after use, and checkpointing computes it again. Training without checkpointing must keep all of
        # them anyway, and one piece is fastest.
        size = hidden.size(1)
        if self.checkpointing or not torch.is_grad_enabled():
            size = max(1, MAX_LOGITS // (hidden.size(0) * self.head.out_features))
        if self.checkpointing:
            apply = recomputed(apply)
        pieces = zip(hidden.split(size, dim=1), targets.split(size, dim=1), strict=True)
        return [apply(*piece) for piece in pieces]

    def documents(self, idx: Tensor) -> Documents | DocumentsInPlace | None:
        """The documents in `idx` int64 [B, T], on the CPU; None without a `document_end`, or if no row has two.

        Where kernels can read them in place, the forward pass finds them, so that nothing is looked for here.
        """
        if self.document_end is None:
            return None
        has_kernels = self.kernels and self.embedding.weight.dtype != torch.float64
        if has_kernels and all(reads_in_place(pe, idx.size(1)) for pe in self.distinct_encodings):
            return DocumentsInPlace(self.document_end)
        return find_documents(idx, self.document_end)

    def position_metrics(self) -> dict[str, Tensor]:
        """The metrics of the position encodings since the last call, each averaged over the encodings that have it."""
        values: dict[str, list[Tensor]] = {}
        for pe in self.distinct_encodings:
            for name, value in pe.metrics().items():
                values.setdefault(name, []).append(value)
        return {name: torch.stack(values[name]).mean() for name in sorted(values)}

    def new_cache(self) -> KVCache:
        """An empty cache for `forward`."""
        return KVCache(self.cfg.n_layer)

    def n_parameters(self) -> dict[str, int]:
        """Parameter counts: "total"; "embedding", token tables; "position", the encoding's; "body", the rest."""
        total = sum(p.numel() for p in self.parameters())
        # A set, since tied weights are one tensor under two names.
        embedding = sum(p.numel() for p in {self.embedding.weight, self.head.weight})
        position = sum(p.numel() for pe in self.distinct_encodings for p in pe.parameters())
        body = total - embedding - position
        return {"total": total, "embedding": embedding, "position": position, "body": body}

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward for each token of a causal sequence of `length` tokens.

        Counted as in PaLM (arXiv 2204.02311, appendix B): 6 for each weight of a matrix product; attention counts half
        of the T x T scores, since it is causal. Those of an encoding are left out, so that utilisations compare.
        """
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        attention = self.cfg.n_layer * self.cfg.n_head * self.cfg.head_width * length
        return 6 * weights + 6 * attention
