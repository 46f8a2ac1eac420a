"""Populations: many agents as one batch; number formats, and state that is kept in few bits."""
