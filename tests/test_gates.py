"""What CoPE is for, end to end: counting the writes back to the last one, however many bits are to be ignored."""

import pytest
from torch import Tensor

import data as data_sources
from conf.run_dir import read_config
from conf.schema import check
from evaluation import lengths
from evaluation.results import load_all
from model import serialization
from model.position import cope

# Few entries in the table, because one write is all there is to count: each of seeds 0 to 7 had at most 0.4 % wrong
# in any slice. With 64 entries and sequences of 128, one seed of three fails.
SETTINGS = [
    "data=flip_flop", "train_len=32", "model.n_layer=2", "model.dim=64", "model.n_head=2", "model.init_std=0.06",
    "optim.lr=2e-3", "optim.beta2=0.98", "optim.warmup_steps=30", "optim.weight_decay=0.01", "trainer.max_steps=250",
    "trainer.batch_size=64", "trainer.log_every=100", "trainer.val_every=250", "trainer.checkpoint_every=250",
    "eval.lengths=[1]", "eval.sequences=128", "trainer.precision=32",
]  # fmt: skip


@pytest.fixture
def errors(train, monkeypatch):
    """`errors()` trains CoPE; then `errors(positions)` reads its weights with other positions. Wrong answers by slice,
    in percent."""

    def of(found) -> dict[str, float]:
        measured = [m for e in found if e.kind == "lengths" for m in e.measured]
        return {m.name: 100 * sum(m.errors) / sum(m.tokens) for m in measured}

    def measure(positions=None) -> dict[str, float]:
        run = train.runs / "cope-flip_flop"
        if positions is None:
            outcome = train("pe=cope", "pe.npos_max=8", *SETTINGS)
            assert outcome.code == 0, outcome.err
            return of(load_all(run))
        with monkeypatch.context() as patch:
            patch.setattr(cope, "contextual_positions", positions)
            patch.setattr(cope.AddPositions, "apply", cope.by_definition)
            cfg = check(read_config(run))
            about = dict(run=run.name, run_id="", step=0, provenance=load_all(run)[0].provenance)
            return of(lengths.evaluate(serialization.load(run), data_sources.build(cfg.data), cfg, about=about))

    return measure


def test_gates_find_the_last_write(errors):
    trained = errors()
    assert set(trained) == {"in-distribution", "dense", "sparse"}
    assert max(trained.values()) < 2, trained
    defined = errors(cope.contextual_positions)
    assert defined == pytest.approx(trained, abs=0.5), (defined, trained)  # two answers may round the other way

    def distances(gate_logits: Tensor, visible: Tensor) -> Tensor:
        """Every gate open: a position is a distance, and there is no counting."""
        return visible.to(gate_logits.dtype).flip(-1).cumsum(-1).flip(-1).expand_as(gate_logits)

    blind = errors(distances)
    assert min(blind["in-distribution"], blind["dense"]) > 10, blind
