"""Fast attention kernels; the plain version of each, its specification, is in `model.position`."""
