"""Comparisons over seeds: studies, statistics and figures."""
