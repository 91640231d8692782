"""What a training run needs besides network and data: ranks, hardware, optimizer, checkpoints, signals, progress."""
