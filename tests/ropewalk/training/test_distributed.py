"""Who started the processes of a run."""

import pytest

from ropewalk.training.distributed import env_rank, started_by

RESERVED = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "", "SLURM_JOB_NAME": "mine"}
BATCH = RESERVED | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}


@pytest.mark.parametrize(("variables", "processes", "rank"), [(RESERVED, 1, 0), (BATCH, 1, 0), (STEP, 4, 3)])
def test_slurm_starts_processes_by_srun_alone(monkeypatch, variables, processes, rank):
    """In a shell of salloc and in a batch script python is one process, whatever is reserved."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_by().world_size == processes
    assert env_rank() == rank


@pytest.mark.parametrize("variables", [RESERVED, BATCH])
def test_a_run_in_a_reservation(train, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = train("pe=rope", "trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]")
    assert outcome.code == 0, outcome.err
