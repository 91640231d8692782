"""Verdicts on encodings of one's own: tries, counted and compared with RoPE, and a board of what anybody entered.

For: one number a stranger can beat, measured as honestly as our own. Shown: docs/board.md. Leaves: never, while the
board has entries.
"""
