"""Modules that import nothing of ours: safe files, classes by name, and the constant that data and network share."""

IGNORE_INDEX = -100  # a target that is not scored, as in torch's cross_entropy
