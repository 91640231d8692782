"""Leaves, which import nothing of ours: whole files, what a name stands for, and what data and network agree on."""

IGNORE_INDEX = -100  # a target that is not scored, as in torch's cross_entropy
