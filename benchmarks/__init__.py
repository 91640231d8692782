"""What `scripts/bench.py` measures, and how."""
