"""Drawings of what encodings do."""
