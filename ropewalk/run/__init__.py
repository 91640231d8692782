"""What a run is on the disk and as processes: read by training, evaluation and report alike."""
