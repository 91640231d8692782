"""The measures: losses by length, far copies, key tokens, reach, RULER."""
