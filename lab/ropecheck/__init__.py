"""Does this engine compute the RoPE that was configured?

- For: authors and users of engines and trainers; the page is docs/ropecheck.md. It needs Python and numpy alone, and
  nothing of the other folders here: copy this one anywhere.
- Has shown: known faults of three public projects in their old versions, and others that docs/ropecheck.md lists.
- Leaves: when transformers, or whoever writes the settings, ships golden vectors with them.
"""
