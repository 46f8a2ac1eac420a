"""What goes around a part of a run."""


class Around:
    """A part that holds another one, `inner`, and does some of its work in another place or faster. What a subclass does not
    define is the inner part's."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name: str):
        if name == "inner":  # not there yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.inner, name)
