"""The origin of a number: command, source, software, processor."""

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# Where code can come from: untracked files elsewhere, such as a corpus of Python files, are not part of the program.
SOURCE_FOLDERS = ("conf", "data", "lab", "model", "ropewalk", "scripts")


def provenance(**more: Any) -> dict[str, Any]:
    """Return command, commit and changes to it, time, torch and processor, together with `more`."""
    commit, diff = source_state()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit,
        "dirty": bool(diff),
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "processor": _processor(),
        **more,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):  # Linux only
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if model:
            return model[1]
    return platform.processor() or platform.machine()


@cache
def source_state() -> tuple[str | None, str]:
    """Return the project's commit and how its source differs from it, new source files included.

    It is read once, at the first call, so that it describes the code that runs. Both are empty without git.
    """
    if not shutil.which("git"):
        return None, ""
    commit = git("rev-parse", "--verify", "HEAD").strip() or None
    # `git diff HEAD` leaves new files out: each is compared with an empty one.
    additions = [git("diff", "--no-index", "--", os.devnull, name) for name in _new_files()]
    return commit, git("diff", "HEAD") + "".join(additions)


def git(*arguments: str, folder: Path | None = None) -> str:
    """Return what a command of git prints in a folder, by default the project's; "" if it fails."""
    command = ["git", "-C", str(folder or ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout


def _new_files() -> list[str]:
    """The untracked source files: in the project's folders, or imported, as an encoding of the user's has been.

    A file beside these folders may hold a key or a password.
    """
    imported = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    listed = filter(None, git("ls-files", "--others", "--exclude-standard", "-z", "--", "*.py", "*.yaml").split("\0"))
    return [name for name in listed if name.partition("/")[0] in SOURCE_FOLDERS or str(ROOT / name) in imported]
