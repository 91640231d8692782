"""Programs side by side: each has its place, its log and its end; one that fails harms no other."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import ROOT

from ropewalk.app.side_by_side import LAUNCHER_ENV, RESULT_ENV, places_of, run_all
from ropewalk.run.stop import PARENT_ENV

SAYS = "import os; os.write(int(os.environ['ROPEWALK_RESULT']), os.environ.get('CUDA_VISIBLE_DEVICES', '-').encode())"
ENDS = {
    "says": SAYS,
    "mistaken": "import sys; sys.exit('error: pe=yarm: no such option')",
    "broken": "1 / 0",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "raise SystemExit(75)",
}


def run(programs, places, folder):
    return run_all({name: ["-c", program] for name, program in programs.items()}, places, folder / "logs")


def test_each_end_is_told(tmp_path, capsys):
    ended = run(ENDS, [{}, {}], tmp_path)
    problems = {name: end.problem for name, end in ended.items()}

    assert problems == {
        "says": "",
        "mistaken": "failed: pe=yarm: no such option",
        "broken": "failed: ZeroDivisionError: division by zero",
        "killed": "killed, perhaps for lack of memory",
        "stopped": "stopped by a signal, after a checkpoint",
    }
    assert ended["says"].result == b"-"
    assert "killed: killed, perhaps for lack of memory; " in capsys.readouterr().out


def test_a_reason_is_not_that_of_an_earlier_attempt(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "silent.txt").write_text("error: what was wrong before\n")

    assert run({"silent": "raise SystemExit(3)"}, [{}], tmp_path)["silent"].problem == "failed: exit code 3"


def test_each_gpu_has_a_run_at_a_time(tmp_path, monkeypatch):
    """Those that are visible; several processes of one run have all of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert places_of({"accelerator": "auto"}) == [{"CUDA_VISIBLE_DEVICES": name} for name in "012"]
    assert places_of({"strategy": "ddp", "devices": "auto"}) == places_of({"devices": 2}) == [{}]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    places = places_of({"accelerator": "cuda"})
    ended = run(dict.fromkeys("abcd", SAYS + "; import time; time.sleep(0.5)"), places, tmp_path)

    assert sorted(end.result for end in ended.values()) == [b"5", b"5", b"7", b"7"]


def test_each_core_has_a_run_with_one_thread(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 3 * 2**19}[name])

    assert places_of({"accelerator": "cpu"}) == 3 * [{"OMP_NUM_THREADS": "1"}]  # 2 GiB for each
    assert places_of({"accelerator": "cpu"}, n_jobs=1) == [{}]
    assert len(places_of({"accelerator": "cpu"}, n_jobs=5)) == 5


WAITS = """
import pathlib, signal, sys, time
def stop(*_):
    print("a checkpoint")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
pathlib.Path("{}").touch()
time.sleep(600)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_stops_all_after_a_checkpoint(tmp_path, capsys, name, code):
    """It may reach this process alone. What had not begun does not begin."""
    begun = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]

    def stop():
        while not (begun[0].exists() and begun[1].exists()):
            time.sleep(0.05)
        os.kill(os.getpid(), getattr(signal, name))

    threading.Thread(target=stop).start()
    with pytest.raises(SystemExit) as end:
        run({path.name: WAITS.format(path) for path in begun}, [{}, {}], tmp_path)

    assert end.value.code == code
    assert [path.exists() for path in begun] == [True, True, False]
    assert (tmp_path / "logs" / "a.txt").read_text() == "a checkpoint\n"
    said = capsys.readouterr().out
    assert f"{name}: waiting for 2 to write a checkpoint" in said
    assert f"{name}: stopped, 0 of 3 had ended; rerun the same command to resume" in said
    assert RESULT_ENV not in os.environ


@pytest.mark.parametrize("variable", [LAUNCHER_ENV, PARENT_ENV])
def test_a_process_whose_starter_is_gone_ends_before_it_has_imported_anything(variable):
    command = [sys.executable, "train.py", "--help"]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {variable: "1"}, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")
