"""Where and how fast a run computes. Builds on the core, tasks/ and lab/, which import nothing from here."""
