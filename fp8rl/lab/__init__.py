"""Number formats, and state that is kept in few bits. Builds on the core alone."""
