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
MAX_NEW_FILE = 2**17  # bytes: a larger new file is recorded by its hash alone
MAX_NEW_FILES = 2**20  # bytes of new files in all that are recorded whole


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
    commit = _git("rev-parse", "--verify", "HEAD").strip() or None
    return commit, _git("diff", "HEAD") + _new_files()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout


def _new_files() -> str:
    """The untracked source files, as a diff would show them; large ones by their SHA-256 alone.

    They lie at the top level, in the project's own folders, or have been imported, as an encoding of the user's has.
    """
    imported = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    names = _git("ls-files", "--others", "--exclude-standard", "-z", "--", "*.py", "*.yaml").split("\0")
    parts = []
    total = 0
    for name in sorted(filter(None, names)):
        path = ROOT / name
        in_our_folder = name.split("/")[0] in SOURCE_FOLDERS or "/" not in name
        if path.is_symlink() or not (in_our_folder or str(path) in imported):
            continue
        content = path.read_bytes() if os.access(path, os.R_OK) else b""
        total += len(content)
        if len(content) > MAX_NEW_FILE or total > MAX_NEW_FILES:
            parts.append(f"new file {name}: {len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}\n")
            continue
        lines = content.decode(errors="replace").splitlines()
        header = f"--- {os.devnull}\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n"
        parts.append(header + "".join(f"+{line}\n" for line in lines))
    return "".join(parts)
