"""Where and how fast a run computes. Builds on the core, which imports nothing from here."""
