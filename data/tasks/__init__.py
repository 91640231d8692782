"""Synthetic tasks in which positions decide, one file each; `base.py` has what they share."""
