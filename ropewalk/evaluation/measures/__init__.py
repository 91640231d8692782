"""The measures: losses by length, far copies, reach, RULER."""
