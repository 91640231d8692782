"""Who started the processes of a run; and which encodings of it get kernels."""

from types import SimpleNamespace

import lightning.fabric.connector
import pytest
import torch

from model.gpt import GPT
from ropewalk import plugins
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check
from ropewalk.evaluation.results import load_all
from ropewalk.training import hardware
from ropewalk.training.distributed import env_rank, resolve_devices, started_by
from ropewalk.training.plan import Plan

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


def test_a_process_that_sees_one_gpu_of_many_is_told_how_to_see_them_all(monkeypatch):
    """As by --gpus-per-task=1."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"trainer\.devices=4 .* sees 1 GPUs; .* --gpus-per-node"):
        resolve_devices("auto", num_nodes=1, device="cuda")


def test_a_notebook_is_one_process(train, monkeypatch):
    monkeypatch.setattr(lightning.fabric.connector, "_IS_INTERACTIVE", True)
    outcome = train("pe=rope", "trainer=ddp", "trainer.devices=2")
    assert outcome.code == 2
    assert "trainer.devices=2: " in outcome.err
    assert "not compatible with an interactive environment" in outcome.err


STAGES = ("stages=[{steps: 2, train_len: 8}]", "pe.window=8", "trainer.short_window=4")


def test_a_plan_knows_the_encodings_of_all_steps():
    cfg = check(train_values("pe=rope", "stages=[{steps: 9, train_len: 8}]", *STAGES[1:]))
    net = GPT(cfg.model, cfg.pe, vocab_size=9, train_len=cfg.train_len)
    plan = Plan(cfg, net)
    used = {pe for step in range(1, 40) for pe in plan.at(step)}
    assert used == set(plan.encodings)
    assert len(used) == 4  # with a short window or not, in the stage or after it


@pytest.mark.parametrize("problem", ["", "they are wrong here"])
def test_all_encodings_get_kernels_and_results_say_whether_they_did(train, monkeypatch, problem):
    installed = []

    def install(encodings):
        installed.extend(encodings)
        for pe in encodings:
            pe.is_twin = True

    kernels = SimpleNamespace(problem=lambda encodings, device: problem, install=install)
    monkeypatch.setattr(plugins, "kernels", lambda: kernels)
    monkeypatch.setattr(hardware, "kernel_problem", lambda device, precision: "")
    outcome = train("pe=rope", *STAGES, "trainer.kernels=auto", "eval.lengths=[1]", "eval.variants=[yarn]")
    assert outcome.code == 0, outcome.err
    windows = {(pe.train_len, pe.window) for pe in installed}
    assert windows == (set() if problem else {(8, 8), (8, 4), (16, 8), (16, 4)})
    results = load_all(train.runs / "rope-text")
    assert [result.provenance["kernels"] for result in results] == [not problem] * 2
    assert f"kernels {not problem}".lower() in outcome.out
