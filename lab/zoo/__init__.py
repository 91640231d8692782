"""Encodings beside the core: described somewhere, seldom used."""
