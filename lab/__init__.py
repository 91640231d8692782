"""What is tried beside the core, which imports nothing of it: see CONTRIBUTING.md for the rules."""
