"""Populations: many agents that are trained as one batch."""
