"""The measures: losses by length and by position, far copies. Reach and RULER are in the lab."""
