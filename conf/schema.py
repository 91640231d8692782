"""The configuration schema: types and ranges. Unknown keys and wrong types are errors that name the key.

Each key is documented beside its default in the YAML files, and by --help. A configuration is frozen:
`ropewalk.app.resolve` fills in what is left open, and from then on everything reads the same values.
"""

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from conf.errors import ConfigError, unknown_key
from conf.foreign import foreign_hint

# This package imports nothing of ours, so that every module may import the section that it reads.

S = TypeVar("S", bound=BaseModel)


def _check_name(name: str) -> str:
    """Return `name` if it can be the name of a file or folder. Raises ValueError: lists each rule that it breaks."""
    # Names become paths and cells of tables. Prefixes and suffixes of ours (.NAME.partial) must fit into the 255 bytes
    # that file systems allow.
    rules = [
        (not name, "must not be empty"),
        (name.startswith("."), "must not begin with a dot"),
        (name != name.strip(), "must not begin or end with a blank"),
        (not name.isprintable(), "must have printable characters only"),
        ("/" in name or "\\" in name, "must not contain / or \\"),
        (len(name.encode(errors="replace")) > 200, "must have at most 200 bytes"),
    ]
    broken = [message for is_broken, message in rules if is_broken]
    if broken:
        raise ValueError("a name " + ", ".join(broken))
    return name


Name = Annotated[str, AfterValidator(_check_name)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Width = Annotated[int, Field(ge=1, le=2**22)]
MAX_LEN = 2**24  # tokens of a text in training
Precision = Annotated[
    Literal["auto", "32-true", "bf16-mixed", "bf16-true"],
    BeforeValidator(lambda value: "32-true" if value == 32 else value),
]
Accelerator = Annotated[
    Literal["auto", "cpu", "cuda", "mps"],
    BeforeValidator(lambda value: "cuda" if value == "gpu" else value),
]
WandbMode = Annotated[
    Literal["online", "offline"],
    BeforeValidator(lambda value: "online" if value == "auto" else value),
]


class Section(BaseModel):
    """Base class of every section. Setting a field is an error; `model_copy(update=...)` makes a changed copy.

    A run may be older than a field. So a new one has the default that does what was done before.
    """

    # Strict: a text is no number, so that train_len="512" or compile=1 is an error and not a guess.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Optim(Section):
    lr: float = Field(gt=0)
    min_lr_ratio: float = Field(ge=0, le=1)
    warmup_steps: int = Field(ge=0, le=2**31 - 1)
    weight_decay: float = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    grad_clip: float | None = Field(gt=0)
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    decay_share: float = Field(0.2, ge=0, le=1)
    pe_lr_scale: float = Field(1.0, gt=0)
    optimizer: dict[str, Any] | None = None


class Trainer(Section):
    max_steps: int = Field(ge=0, le=2**31 - 1)
    batch_size: Count
    grad_accum_steps: Count
    log_every: Count
    val_every: Count
    val_tokens: Count
    sample_every: int = Field(0, ge=0, le=2**31 - 1)
    checkpoint_every: Count
    checkpoint_minutes: float = Field(gt=0)
    positions: Literal["consecutive", "random", "pose"]
    max_position: Annotated[Count, Field(le=MAX_LEN)] | None  # each step draws from so many: 8 bytes each
    keep_checkpoints: Count
    accelerator: Accelerator
    strategy: Literal["auto", "ddp", "fsdp"]
    devices: Count | Literal["auto"]
    replicas: Count = 1
    context_parallel: Count = 1
    precision: Precision
    compile: bool | Literal["auto"]
    checkpointing: bool
    deterministic: bool = False
    kernels: bool | Literal["auto"] = False
    time_limit: float | None = Field(None, gt=0)


class Eval(Section):
    lengths: list[Annotated[float, Field(gt=0, le=10_000)]] = Field(min_length=1)
    target_tokens: Count | None
    sequences: Count
    by_position: bool
    far_copies: bool
    variants: list[Name | dict[str, Any]] | None
    at: list[Count]
    tolerance: float = Field(ge=0)


class Logger(Section):
    """The trackers that show a run; `trackers` are loggers of Lightning's, by name. All other options are wandb's."""

    tensorboard: bool = False
    wandb: bool = False
    trackers: dict[str, dict[str, Any]] = {}
    project: str | None = None
    mode: WandbMode | None = None
    entity: str | None = None
    tags: list[str] = []
    group: str | None = None
    notes: str | None = None


class Stage(Section):
    """Steps at another length before those at the configuration's own `train_len`; `pe` holds options that differ."""

    steps: Count
    train_len: Annotated[int, Field(ge=2)]
    pe: dict[str, Any] = {}


class Pattern(Section):
    """What a pattern of encodings over the layers has beside the encodings."""

    name: Name
    pattern: list[Name] = Field(min_length=1)


class GPTConfig(Section):
    """Architecture. Widths are in channels; a field left null takes the usual value beside it."""

    n_layer: int = Field(4, ge=1, le=1_000)
    n_head: Width = 4
    n_kv_head: Width | None = None  # n_head; fewer: grouped-query attention
    dim: Width = 128
    head_dim: Width | None = None  # dim / n_head
    hidden_dim: Width | None = None  # 4 dim, or 8/3 dim where the MLP is gated, which takes three matrices
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_at: Literal["before", "after", "both"] = "before"  # each branch; after: OLMo 2 and 3; both: Gemma 2 and 3
    norm_eps: float = Field(1e-5, gt=0)
    mlp: Literal["gelu", "gelu_exact", "swiglu", "geglu"] = "gelu"  # gelu is its tanh approximation, as in GPT-2
    bias: bool | Literal["qkv", "attention"] = False  # of linear layers and LayerNorm, or of those projections alone
    sinks: bool = False  # attention sinks: see `model.attention.softmax`
    conv: int | None = Field(None, ge=2, le=64)  # tokens of a short convolution: see `model.mix`
    key_offset: bool = False  # half of each key's channels are those of the token before
    qk_norm: bool | Literal["projection"] = False  # RMSNorm of queries and keys before the rotation: each head, or all
    tie_embeddings: bool = True
    dropout: float = Field(0.0, ge=0, lt=1)  # of the embedding and of each branch, not of attention weights
    init_std: float = Field(0.02, gt=0)
    vocab_multiple: Width = 1  # the vocabulary is padded to a multiple of this; 64 suits GPUs

    @model_validator(mode="after")
    def _divisible(self) -> "GPTConfig":
        if self.head_dim is None and self.dim % self.n_head:
            # The nearest number of heads that divides dim; 1 always does.
            divisors = [n for n in range(1, self.dim + 1) if self.dim % n == 0]
            best = min(divisors, key=lambda n: abs(n - self.n_head))
            raise ValueError(f"model.n_head={self.n_head} does not divide dim={self.dim}; try model.n_head={best}")
        if self.n_head % self.kv_heads:
            raise ValueError(f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}")
        if self.key_offset and self.head_width % 2:
            raise ValueError(f"model.key_offset=true: a head of {self.head_width} channels has no half; make it even")
        return self

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.n_head

    @property
    def hidden(self) -> int:
        if self.hidden_dim:
            return self.hidden_dim
        if self.gated:
            return -(-8 * self.dim // 3 // 8) * 8  # 8/3 dim, rounded up to a multiple of 8
        return 4 * self.dim

    @property
    def gated(self) -> bool:
        return self.mlp in ("swiglu", "geglu")


class Config(Section):
    """A whole run. `pe` and `data` hold a `_target_` and the options of that class; `pe` may be a pattern of such."""

    seed: int = Field(ge=0, lt=2**63)
    name: Name | None
    runs_dir: str
    train_len: int = Field(ge=2, le=MAX_LEN)
    stages: list[Stage]
    objective: Literal["validation"] | Annotated[float, Field(gt=0)] = "validation"
    init_from: str | None
    init_partial: bool
    init_optimizer: bool
    pe: dict[str, Any]
    model: GPTConfig
    data: dict[str, Any]
    optim: Optim
    trainer: Trainer
    eval: Eval
    logger: Logger

    def stage_of(self, steps_done: int) -> int:
        """The stage, counted from 0, of the step after `steps_done` steps; len(stages) after the last stage."""
        return bisect([*accumulate(stage.steps for stage in self.stages)], steps_done)

    def batch_shape(self, steps_done: int) -> tuple[int, int]:
        """Sequences in the optimizer step after `steps_done` steps, and tokens of each."""
        # Shorter sequences are more, so that every step has the same number of tokens.
        length = self.train_lengths[self.stage_of(steps_done)]
        return self.trainer.batch_size * self.train_len // length, length

    @property
    def train_lengths(self) -> list[int]:
        """Tokens of a training sequence in each stage and, as the last entry, after the stages."""
        return [*(stage.train_len for stage in self.stages), self.train_len]

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step, the same in all stages."""
        return self.trainer.batch_size * self.train_len

    @property
    def target_tokens(self) -> int:
        """Number of tokens at the end of each evaluation text that are scored, the same at every length."""
        # A quarter of the shortest length: every target has at least 3/4 of its row's length before it, and in the
        # longer rows nearly all of it. Tables state the context.
        return self.eval.target_tokens or max(1, min(self.lengths) // 4)

    @property
    def lengths(self) -> list[int]:
        """Text lengths in tokens, each once, ascending."""
        return sorted({round(ratio * self.train_len) for ratio in self.eval.lengths})


# Keys in the files of older versions, each with the only value that is accepted, which did nothing or is what is always
# done now. `...`: any value is accepted, as none changed the results.
REMOVED_KEYS = {
    "data.lengths": None,
    "data.min_tokens": 0,
    "dry_run": ...,
    "eval.task_tolerance": ...,
    "logger.csv": ...,
    "logger.kind": ...,
    "logger.log_model": ...,
    "logger.trackio": ...,
    "model.conv_at": "B",
    "model.gate": "none",
    "model.parallel": False,
    "overwrite": ...,
    "trainer.checkpoint_parts": ...,
    "trainer.num_nodes": ...,
    "trainer.short_window": None,
}


def without_removed(values: Any, prefix: str = "") -> Any:
    """Return the values of a file without REMOVED_KEYS. Raises ConfigError: one of them did something."""
    if not isinstance(values, Mapping):
        return values
    kept = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in REMOVED_KEYS:
            kept[key] = without_removed(value, f"{name}.")
        elif REMOVED_KEYS[name] not in (..., value):
            raise ConfigError(f"{name}={value} is no longer supported; version 0.2 has it")
    return kept


def parse(schema: type[S], values: Any, prefix: str = "") -> S:
    """Return plain `values` as an instance of `schema`, the class of a section whose keys follow this prefix.

    Raises:
        ConfigError: a line for each key that is wrong.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
    by_key: dict[str, list[Mapping[str, Any]]] = {}  # of a union pydantic reports every alternative
    for detail in details:
        keys, _ = _located(detail["loc"], values)
        if detail["type"] == "missing":
            keys.append(str(detail["loc"][-1]))
        by_key.setdefault(".".join(keys), []).append(detail)
    lines = [_explained(prefix + key, errors, values, schema) for key, errors in by_key.items()]
    raise ConfigError("\n".join(lines))


def _explained(key: str, errors: Sequence[Mapping[str, Any]], values: Any, schema: type[BaseModel]) -> str:
    """Return the line about a key of which pydantic has reported these errors."""
    first = errors[0]
    keys, found = _located(first["loc"], values)
    value = found[-1]
    match first["type"]:
        case "missing":
            return f"{key} is missing"
        case "extra_forbidden":
            return unknown_key(key, _section_at(keys[:-1], schema).model_fields)
        # A validator of a whole section, such as `GPTConfig._divisible`, names the keys itself.
        case "value_error" if isinstance(value, Mapping):
            return str(first["ctx"]["error"])
    reason = first["msg"].removeprefix("Value error, ")
    if reason.startswith("Input should be "):
        alternatives = [error["msg"].partition("Input should be ")[2] for error in errors]
        reason = "it should be " + " or ".join(filter(None, alternatives))
    return f"{key.rstrip('.') or 'the configuration'}={value!r}: {reason}{foreign_hint(key, value)}"


def _section_at(keys: Iterable[str], schema: type[BaseModel]) -> type[BaseModel]:
    """Return the class of the section to which `keys` lead in `schema`."""
    for key in keys:
        if key.isdigit():  # the number of a section in a list
            continue
        kind: Any = schema.model_fields[key].annotation
        while get_args(kind):  # list[Stage], or Section | None
            kind = get_args(kind)[0]
        schema = kind
    return schema


def _located(location: Iterable[Any], values: Any) -> tuple[list[str], list[Any]]:
    """Follow the location of an error of pydantic's into the values, as far as they have it.

    Returns:
        The keys on the way, and what lies there: first `values` itself, then what each key leads to.
    """
    keys: list[str] = []
    found = [values]
    for part in location:
        value = found[-1]
        # A key of a section, or the number of a section in a list. A list of plain values is reported whole.
        is_key = isinstance(value, Mapping) and part in value
        is_number = isinstance(value, list) and part in range(len(value)) and isinstance(value[part], Mapping)
        # Other parts name alternatives of a union: they are no keys.
        if is_key or is_number:
            keys.append(str(part))
            found.append(value[part])
    return keys, found
