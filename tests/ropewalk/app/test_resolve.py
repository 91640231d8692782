"""Which encodings can read the weights of a trained model."""

import pytest

from conf.options import encoding
from conf.schema import GPTConfig
from ropewalk.app.resolve import resolve_encoding, variants

MODEL = GPTConfig(n_layer=2, n_head=2, dim=16).model_dump()


def read(trained, wanted):
    pe, _ = resolve_encoding(encoding(trained), GPTConfig(**MODEL), 16)
    description = {"model": MODEL, "pe": pe, "train_len": 16, "original_len": 16}
    return variants(description, [wanted])


@pytest.mark.parametrize(
    ("trained", "wanted"),
    [
        ("relative", {"pe": "relative", "max_distance": 3}),
        ("relative", {"pe": "relative_capped", "max_distance": 3}),
        ("cope", {"pe": "cope", "npos_max": 8}),
        ("cope", {"pe": "cope", "shared": True}),
        ("cope", {"pe": "cope", "gates": "projection"}),
        ("t5", {"pe": "t5", "num_buckets": 8}),
    ],
)
def test_options_that_change_the_parameters_cannot_read_them(trained, wanted):
    """They would be read under the new name all the same, since their names fit."""
    with pytest.raises(ValueError, match="whose parameters have other names or shapes; fine-tune"):
        read(trained, wanted)
