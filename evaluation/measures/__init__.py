"""The measures: losses by length, far copies, RULER."""
