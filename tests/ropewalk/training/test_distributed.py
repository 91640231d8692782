"""Who started the processes of a run; and which encodings of it get kernels."""

import pytest

from model.gpt import GPT
from ropewalk.app.configure import train_values
from ropewalk.app.resolve import check
from ropewalk.run.processes import started_by
from ropewalk.training.schedule import Schedule

RESERVED = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "", "SLURM_JOB_NAME": "mine"}
BATCH = RESERVED | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}


@pytest.mark.parametrize(
    ("variables", "processes", "rank"),
    [
        (RESERVED, 1, 0),
        (BATCH, 1, 0),
        (STEP, 4, 3),
    ],
)
def test_slurm_starts_processes_by_srun_alone(monkeypatch, variables, processes, rank):
    """In a shell of salloc and in a batch script python is one process, whatever is reserved."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_by().world_size == processes
    assert started_by().rank == rank


def test_a_run_in_a_reservation(train, monkeypatch):
    """Fabric must not wait there for processes that nobody starts."""
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    train("pe=rope", "trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]")


def test_a_plan_knows_the_encodings_of_all_steps():
    """With a short window or not, in the stage or after it."""
    cfg = check(train_values("pe=rope", "stages=[{steps: 9, train_len: 8}]", "pe.window=8", "trainer.short_window=4"))
    net = GPT(cfg.model, cfg.pe, vocab_size=9, train_len=cfg.train_len)
    schedule = Schedule(cfg, net)
    used = {pe for step in range(1, 40) for pe in schedule.at(step)}

    assert used == set(schedule.encodings)
    assert len(used) == 4
