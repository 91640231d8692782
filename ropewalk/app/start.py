"""The first lines of every program: a mistake is answered before the libraries are imported, which takes seconds."""

from typing import NoReturn


def run(module: str) -> NoReturn:
    """Run the program `module` with the command line of this process.

    Args:
        module: see `cli.run`.
    """
    try:
        from ropewalk.app import cli
    except ModuleNotFoundError as error:
        remedy = "`make demo` installs all that is needed, and `. .venv/bin/activate` enters that environment"
        raise SystemExit(f"error: {error.name} is not installed here: {remedy}") from None
    cli.run(module)
    raise SystemExit(0)
