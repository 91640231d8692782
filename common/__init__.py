"""Leaves that import nothing of ours: whole files, and what a name stands for."""
