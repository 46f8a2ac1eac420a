"""Comparing runs: statistics, studies, figures. Stands on the core, which imports none of it."""
