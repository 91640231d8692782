"""Runs of train.py in processes of their own, which end by a signal at a chosen moment.

A server imports the heavy libraries once and forks for each process, so that one costs a second instead of ten.
"""

import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from hydra.core.plugins import Plugins

from ropewalk.run.stop import EXIT_STOPPED

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["train", "lightning.fabric", "ropewalk.training.ranks", "data.text", "tests.process_helpers"]
)

Plugins.instance()  # imports them, here and in the server
STEP = "model.gpt.GPT.forward"  # called once for each micro-batch of training


def start(
    arguments: list[str],
    prepare: Callable[[], None] | None = None,
    output: str = os.devnull,
    environment: dict[str, str] | None = None,
) -> ForkServerProcess:
    """A process that calls `prepare` and the main function of train.py; what it prints goes to `output`."""
    process = CONTEXT.Process(target=_run, args=(arguments, prepare, output, environment or {}))
    process.start()
    # Each start asks all known processes whether they have ended, and a process can tell it only once: of two threads
    # that ask, one would hear 255.
    multiprocessing.process._children.discard(process)
    return process


def live(*arguments: Any, **options: Any) -> int:
    """`start` and wait: the exit code, or minus the signal."""
    process = start(*arguments, **options)
    process.join()
    return process.exitcode


def terminated(command: list[str], *files: Path, **options: Any) -> tuple[str, str]:
    """Start a command, and stop it by a signal to its first process once these files exist: what it said."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **output, **options)
    while process.poll() is None and not all(file.exists() for file in files):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == EXIT_STOPPED, err
    return out, err


def _run(
    arguments: list[str],
    prepare: Callable[[], None] | None,
    output: str,
    environment: dict[str, str],
) -> None:
    from ropewalk.app.cli import run
    from ropewalk.report import page

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.setpgrp()  # a group of its own, as a job has it
    os.environ.update(environment)
    sys.argv = [f"{ROOT}/train.py", *arguments]
    page.html = lambda *_: ""  # it takes as long as all else
    if prepare:
        prepare()
    run("train")


class On:
    """Do `action` when `target`, "module.attribute" or "module.class.attribute", is called for the n-th time.

    Args:
        target: resolved here as well, so that a renamed one fails in the test and not in a process that is expected
            to fail anyway.
        n: the call, counted from 1.
        action: what is done before that call.
    """

    def __init__(self, target: str, n: int, action: Callable[[], None]) -> None:
        resolve_name(target)
        self.target = target
        self.n = n
        self.action = action

    def __call__(self) -> None:
        """Replace the target: for good, or within the context that this object is."""
        original = resolve_name(self.target)
        calls = itertools.count(1)

        def counted(*arguments, **options):
            if next(calls) == self.n:
                self.action()
            return original(*arguments, **options)

        self.patch = patch(self.target, counted)
        self.patch.start()

    __enter__ = __call__

    def __exit__(self, *error: Any) -> None:
        self.patch.stop()


def power_cut() -> None:
    """End by an error that is nobody's mistake."""
    raise RuntimeError("power cut")


def kill() -> None:
    """Die at once, with no last word."""
    os.kill(os.getpid(), signal.SIGKILL)


def start_ranks(arguments: list[str], output: Path, *actions: Callable[[], None] | None) -> list[ForkServerProcess]:
    """A run on as many ranks as there are actions. Rank i prints to the file `output` / str(i)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output.mkdir(exist_ok=True)
    world = str(len(actions))
    processes = []
    for rank, action in enumerate(actions):
        environment = {  # as torchrun sets it
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "TORCHELASTIC_RUN_ID": "test",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes.append(start(arguments, action, str(output / str(rank)), environment))
    return processes


def together(*arguments: Any) -> list[int]:
    """`start_ranks` and wait: their exit codes."""
    return ended(start_ranks(*arguments))


def ended(processes: list[ForkServerProcess]) -> list[int]:
    """Wait until processes have ended: their exit codes."""
    try:
        for process in processes:
            process.join()
    finally:  # also after a timeout
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes]
