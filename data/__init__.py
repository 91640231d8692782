"""Sources of token sequences, each a class behind the interface `data.base.Data`."""
