"""Run folders, checkpoints and replay rings in files, and the checks of files from strangers."""
