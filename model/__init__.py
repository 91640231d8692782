"""The network: a decoder-only transformer whose attention takes a pluggable position encoding."""
