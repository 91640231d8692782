"""What stands around training: command line, sweeps, starting weights, run directories."""
