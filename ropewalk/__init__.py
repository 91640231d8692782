"""What surrounds the network, and Ropewalk's interface for Python: `import ropewalk`, then `ropewalk.load(...)`.

The interface is in `ropewalk.api`; it is imported when one of its names is first used, so that `import conf.files`
costs nothing.
"""

from importlib import import_module
from typing import Any

# Names that `__getattr__` makes.
__all__ = ["Model", "__version__", "attend", "curves", "encoding", "encodings", "load", "plot", "runs", "train"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("ropewalk")
    if name == "plot":  # matplotlib, which nothing else imports
        return import_module("ropewalk.report.plot")
    if name not in __all__:
        raise AttributeError(f"module 'ropewalk' has no attribute {name!r}: it has {', '.join(__all__)}")
    return getattr(import_module("ropewalk.api"), name)


def __dir__() -> list[str]:
    return __all__
