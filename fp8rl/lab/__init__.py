"""Populations: many agents as one batch."""
