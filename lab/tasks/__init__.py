"""Tasks that were tried beside those of the core."""
