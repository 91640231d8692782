"""What `scripts/bench.py` measures: one module for each of its modes, and how they measure."""
