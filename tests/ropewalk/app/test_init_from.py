"""A checkpoint is opened in its own run, and says what it was trained to read."""

from ropewalk.app.init_from import opened

OPTIONS = ["pe=rope", "trainer.keep_checkpoints=9", "eval.variants=[]", "eval.lengths=[1]"]


def test_a_checkpoint_of_an_extended_model_has_its_new_length(trained):
    base = trained(*OPTIONS, name="base")
    longer = trained(*OPTIONS, f"init_from={base}", "train_len=32", name="longer")
    finished = opened(longer, step=4).description
    (longer / "model.json").unlink()
    assert opened(longer, step=4).description.items() <= finished.items()
    assert finished["original_len"] == 32
