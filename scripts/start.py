"""Runs the program of this folder that imports it, with the packages of this clone, whichever the environment has."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ropewalk.app.cli import run

run(f"scripts.{Path(str(sys.modules['__main__'].__file__)).stem}")
