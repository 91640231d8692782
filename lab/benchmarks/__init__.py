"""The measurements of `scripts/bench.py` and `scripts/check_gpu.py`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from conf.schema import Count, Section


class Options(Section):
    """Options of both programs; conf/bench.yaml explains them."""

    rounds: int = Field(ge=2)
    device: Literal["auto", "cpu", "cuda", "mps"]
    encodings: list[str | dict[str, Any]] | None
    lengths: list[Count] = Field(min_length=1)
    batch: Count
    compiled: bool
    kernels: bool | Literal["auto"]
    n_head: Count
    head_dim: Count
    dtype: Literal["float32", "bfloat16"]
    steps: Count
    minutes: float = Field(gt=0)
    train_len: Count
    nanogpt: str | None
    shapes: list[Annotated[list[Count], Field(min_length=5, max_length=5)]]
    model: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any]
