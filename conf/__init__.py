"""Configuration: the YAML groups, their closed schema, the command line and the run directory."""
