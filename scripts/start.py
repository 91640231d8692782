"""Starts the programs of this folder with the packages of this clone, whichever clone the environment has installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ropewalk.app.cli import run as run
