"""What surrounds the network, and Ropewalk's interface for Python: `import ropewalk`, then `ropewalk.load(...)`.

The interface is in `ropewalk.api`; it is imported when one of its names is first used, so that `import ropewalk.files`
costs nothing.
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Names that `__getattr__` makes.
__all__ = ["Model", "__version__", "attend", "curves", "encoding", "encodings", "load", "plot", "runs"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("ropewalk")
    if name == "plot":  # matplotlib, which nothing else imports
        return import_module("ropewalk.report.plot")
    if name not in __all__:
        raise AttributeError(f"module 'ropewalk' has no attribute {name!r}: it has {', '.join(__all__)}")
    try:
        return getattr(import_module("ropewalk.api"), name)
    except ImportError as error:
        _name_what_hides_ours(error)
        raise


def _name_what_hides_ours(error: ImportError) -> None:
    """Raise ImportError if a module of the user's is found in place of one of our packages, such as a data.py."""
    folder = Path(__file__).resolve().parents[1]
    for package in ("conf", "data", "model"):
        spec = find_spec(package)
        place = str(spec and spec.origin)
        if not Path(place).resolve().is_relative_to(folder):
            remedy = "rename that, or move it out of Python's path"
            raise ImportError(f"Ropewalk's package {package!r} is hidden by {place}: {remedy}") from error


def __dir__() -> list[str]:
    return __all__
