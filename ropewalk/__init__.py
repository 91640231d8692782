"""What surrounds the network, and Ropewalk's interface for Python: `import ropewalk`, then `ropewalk.load(...)`.

The interface is in `ropewalk.api`; it is imported when one of its names is first used, so that `import ropewalk.files`
costs nothing.
"""

from importlib import import_module
from typing import Any

__all__ = ["Model", "attend", "curves", "encoding", "load", "plot", "runs"]  # noqa: F822: made by __getattr__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ropewalk' has no attribute {name!r}: it has {', '.join(__all__)}")
    # Figures need matplotlib, which nothing else imports.
    return import_module("ropewalk.report.plot") if name == "plot" else getattr(import_module("ropewalk.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
