"""Run folders, checkpoints and replay rings in files, and what in them is distrusted."""
