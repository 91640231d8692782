"""Who started the processes of a run; and which encodings of it get kernels."""

import os
import re

import pytest
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_only

from model.gpt import GPT
from ropewalk.app.configure import train_values
from ropewalk.app.resolve import completed
from ropewalk.run.processes import started_by
from ropewalk.run.stop import PARENT_ENV
from ropewalk.training import distributed
from ropewalk.training.distributed import resolve_devices
from ropewalk.training.hardware import Hardware
from ropewalk.training.schedule import Schedule

RESERVED = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "", "SLURM_JOB_NAME": "mine"}
BATCH = RESERVED | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
TWO_OF_TWO = STEP | {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("devices", "variables", "expected"),
    [
        (2, {}, (False, 0, 2, 1)),
        # Images and clusters set these where nobody has started a process.
        (2, {"LOCAL_RANK": "0"}, (False, 0, 2, 1)),
        (2, {"LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, (False, 0, 2, 1)),
        (2, {"NODE_RANK": "1", "GROUP_RANK": "1"}, (False, 0, 2, 1)),
        (2, {"NODE_RANK": "0", "WORLD_SIZE": "8"}, (False, 0, 2, 1)),
        (2, {"RANK": "0", "WORLD_SIZE": "1"}, (False, 0, 2, 1)),
        # In a shell of salloc and in a batch script python is one process, whatever is reserved.
        (2, RESERVED, (False, 0, 2, 1)),
        (2, BATCH, (False, 0, 2, 1)),
        # srun, which was not told how many processes belong on each machine.
        (2, TWO_OF_TWO, (True, 3, 4, 2)),
        (4, STEP | {"SLURM_TASKS_PER_NODE": "4", "SLURM_NNODES": "1"}, (True, 3, 4, 1)),
        # A step of fewer processes than were reserved.
        (1, STEP | {"SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NNODES": "4"},
         (True, 3, 4, 4)),
    ],
)  # fmt: skip
def test_what_fabric_is_told(monkeypatch, devices, variables, expected):
    """Whether somebody has started the processes; the rank of this one, of how many, on how many machines."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS_PER_NODE", PARENT_ENV):
        monkeypatch.setenv(name, "")  # so that what the test sets ends with it
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = []

    def launch(fabric):
        strategy = fabric._strategy
        environment = strategy.cluster_environment
        processes_are_here = environment.creates_processes_externally
        told.append((processes_are_here, environment.global_rank(), environment.world_size(), strategy.num_nodes))
        world_size = environment.world_size() if processes_are_here else 1
        assert started_by()[1:] == (world_size, environment.global_rank())
        assert os.environ.get("MASTER_ADDR") is None

    monkeypatch.setattr(Fabric, "launch", launch)
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # Fabric sets it for the whole process
    trainer = completed(train_values("pe=rope", f"trainer.devices={devices}", "trainer=ddp")).trainer
    trainer = trainer.model_copy(update={"devices": resolve_devices(devices, device="cpu")})
    with distributed.launch(trainer, Hardware("cpu", "32-true", False)):
        pass

    assert told == [expected]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, "RANK=1 and WORLD_SIZE=2, but neither torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4, but neither torchrun"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "srun has started 3,1 processes .* --ntasks-per-node"),
    ],
)
def test_processes_of_an_unknown_launcher_are_refused(train, monkeypatch, variables, message):
    """Each would train the whole run."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert re.search(message, train("pe=rope", code=2).err)
    assert not train.runs.exists()


def test_a_run_in_a_reservation(train, monkeypatch):
    """Fabric must not wait there for processes that nobody starts."""
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    train("pe=rope", "trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]")


def test_a_plan_knows_the_encodings_of_all_steps():
    """In the stage and after it."""
    cfg = completed(train_values("pe=rope", "stages=[{steps: 9, train_len: 8}]"))
    net = GPT(cfg.model, cfg.pe, vocab_size=9, train_len=cfg.train_len)
    schedule = Schedule(cfg, net)
    used = {pe for step in range(1, 40) for pe in schedule.at(step)}

    assert used == set(schedule.encodings)
    assert len(used) == 2
