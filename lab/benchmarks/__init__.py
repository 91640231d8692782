"""The measurements of `scripts/bench.py` and `scripts/check_gpu.py`.

For: claims about speed. Has shown: the tables of docs/performance.md. Leaves: what no table there shows any more.
"""

from typing import Any, Literal

from pydantic import Field

from conf.schema import Count, Section


class Options(Section):
    """Options of both programs; conf/bench.yaml explains them."""

    rounds: int = Field(ge=2)
    device: Literal["auto", "cpu", "cuda", "mps"]
    encodings: list[str | dict[str, Any]] | None
    lengths: list[Count] = Field(min_length=1)
    batch: Count
    kernels: bool | Literal["auto"]
    n_head: Count
    head_dim: Count
    dtype: Literal["float32", "bfloat16"]
    steps: Count
    minutes: float = Field(gt=0)
    train_len: Count
    nanogpt: str | None
    model: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any]
