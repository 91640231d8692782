"""The frame around training: command line, sweeps, starting weights, run directories."""
