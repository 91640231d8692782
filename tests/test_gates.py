"""What CoPE is for, end to end: counting the writes back to the last one, however many bits are to be ignored."""

from evaluation.results import Results

SETTINGS = [
    "data=flip_flop", "train_len=64", "model.n_layer=2", "model.dim=64", "model.init_std=0.06", "optim.lr=3e-3",
    "optim.warmup_steps=30", "optim.weight_decay=0.01", "trainer.max_steps=300", "trainer.batch_size=32",
    "trainer.log_every=100", "trainer.val_every=300", "trainer.checkpoint_every=300", "eval.lengths=[1]",
    "eval.sequences=128",
]  # fmt: skip


def errors(train, encoding: str) -> dict[str, float]:
    outcome = train(f"pe={encoding}", *SETTINGS)
    assert outcome.code == 0, outcome.err
    rows = Results.load(train.runs / f"{encoding}-flip_flop" / "results.json").lengths
    return {row.slice: row.error for row in rows}


def test_gates_find_the_last_write(train):
    """With gates that are all one CoPE is a relative encoding, and that is far from it after as many steps."""
    cope, relative = errors(train, "cope"), errors(train, "relative")
    assert set(cope) == {"in-distribution", "dense", "sparse"}
    for name, error in cope.items():
        assert error < 2, (name, cope)
    assert relative["dense"] > 8, relative
