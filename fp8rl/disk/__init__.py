"""Run folders, checkpoints, and replay rings in files."""
