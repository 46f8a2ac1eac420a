"""Comparing runs: statistics, studies, figures. Builds on the core, which imports nothing from here."""
