"""Configuration: the YAML groups and their closed schema."""
