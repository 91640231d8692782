"""Measures beside the losses by length."""
