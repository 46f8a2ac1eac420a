"""Many agents trained as one batch."""
