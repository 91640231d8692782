"""The kit of a training run besides network and data: ranks, hardware, optimizer, checkpoints, signals, progress."""
