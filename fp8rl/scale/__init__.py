"""Where a run computes and how fast. Stands on the core, which imports none of it."""
