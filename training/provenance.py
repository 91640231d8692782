"""What a number was made with: command, source, software, processor."""

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


def provenance(**more: Any) -> dict[str, Any]:
    """Command, commit and changes to it, time, torch and processor; and `more`."""
    commit, diff = source_state()
    cpuinfo = Path("/proc/cpuinfo")  # of Linux
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit,
        "dirty": bool(diff),
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "processor": model[1] if model else platform.processor() or platform.machine(),
        **more,
    }


@cache
def source_state() -> tuple[str | None, str]:
    """The project's commit and how its source differed, new files included, when first asked: as the code that runs."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout

    if not shutil.which("git"):
        return None, ""
    new = git("ls-files", "--others", "--exclude-standard", "-z", "--", "*.py", "*.yaml")
    diffs = [git("diff", "--no-index", "--", os.devnull, path) for path in new.split("\0") if path]
    return git("rev-parse", "--verify", "HEAD").strip() or None, git("diff", "HEAD") + "".join(diffs)
