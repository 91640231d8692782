"""A verdict on an encoding of one's own: tries, counted, and compared with RoPE."""
