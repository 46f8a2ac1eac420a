"""Places: what a training keeps or computes in few bits, each in a format of its own (formats.py).

    forward        inputs and weights of the matmuls of the forward pass; their products are summed
                   in float32
    backward       the gradients that are multiplied in the backward pass
    weights        the parameters between updates, instead of a float32 master copy
    m, v           Adam's moments between updates
    root           the root of v, in place of v: half of its exponent's range is enough
    observations   those of replayed slices, in reinforcement learning
    acting         inputs and weights of the acting policy's matmuls; without it, it acts in the
                   format of `forward`
    targets        advantages and value targets

A text names some of them, as in "weights=e4m3:stochastic v=e5m2", and `places_of` reads it. What it
does not name stays float32, as do sums. An update takes its step in float32 from what is stored,
and rounds the result. A format is followed by any of the words

    unscaled     no scale; otherwise each tensor has one, a power of two
    block        a scale for each 32 numbers instead
    stochastic   round up or down at random so that the mean is right; otherwise to the nearest
    stored       (m, v, root) take Adam's step from the moments as they were stored; otherwise it is
                 taken just before
    independent  (m, v, root) round without regard to the other moment, as most low-bit optimizers
                 do; otherwise m and v are rounded so that no step becomes much longer than
                 float32's (`Places.moments`)
"""

from typing import NamedTuple

import torch

from .formats import Format, format_of, rounded, scaled

PLACES = (
    "forward",
    "backward",
    "weights",
    "m",
    "v",
    "root",
    "observations",
    "acting",
    "targets",
)
STATE = ("weights", "m", "v", "root")  # places of an optimizer
WORDS = ("unscaled", "block", "stochastic", "stored", "independent")
OF_MOMENTS = {"stored", "independent"}  # words that only m, v and root can have
BLOCK = 32
# A first step is exactly as long as the learning rate, so without some slack the order of roundings
# would decide.
SLACK = 1.01
NO_NOISE: dict[str, torch.Tensor] = {}


class PlaceFormat(NamedTuple):
    """How the numbers of one place are kept: a format and the words after it."""

    format: Format
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> "PlaceFormat":
        """The format and words in a text such as "e4m3:unscaled"."""
        return places_of(f"m={text}")["m"]

    def __str__(self) -> str:
        return ":".join((self.format.name, *self.words))

    @property
    def scaled(self) -> bool:
        """Whether there is a scale. With 8 exponent bits, as many as float32 has, it would do
        nothing."""
        return "unscaled" not in self.words and self.format.exponent < 8

    @property
    def independent(self) -> bool:
        """Whether a moment of Adam is rounded without regard to the other one."""
        return "independent" in self.words

    @property
    def stochastic(self) -> bool:
        return "stochastic" in self.words

    @property
    def block(self) -> bool:
        """Whether there is a scale for each block of numbers."""
        return self.scaled and "block" in self.words

    def __call__(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Rounds tensors, each flattened to a row of float32 [S, P].

        With `noise` [S, P], uniform in [0, 1), it rounds stochastically.
        """
        if not self.scaled:
            return rounded(x, self.format, noise)
        return scaled(x, self.format, BLOCK if self.block else None, noise)

    def each(
        self, x: torch.Tensor, sizes: list[int], noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rounds rows [S, P] that hold one tensor after the other, of given sizes."""
        parts = x.split(sizes, dim=1)
        noises = [None] * len(sizes) if noise is None else noise.split(sizes, dim=1)
        rounded_parts = [self(part, n) for part, n in zip(parts, noises, strict=True)]
        return torch.cat(rounded_parts, dim=1)

    def matrices(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Rounds matrices [S, M, N]; stochastically with `noise` [S, M N]."""
        return self(x.flatten(1), noise).view_as(x)


class Places(dict[str, PlaceFormat]):
    """The places of a training that are kept in few bits, with their formats."""

    @property
    def noisy(self) -> list[str]:
        """Those of weights, m, v and root that are rounded stochastically."""
        return [name for name in STATE if name in self and self[name].stochastic]

    def split_noise(self, drawn: torch.Tensor) -> dict[str, torch.Tensor]:
        """Noise [..., number of `noisy` places, P] by place, [..., P] each."""
        return dict(zip(self.noisy, drawn.unbind(-2), strict=True))

    def weights(
        self, x: torch.Tensor, sizes: list[int], noise: dict[str, torch.Tensor] = NO_NOISE
    ) -> torch.Tensor:
        """Parameters [S, P], tensors of given sizes, as they are kept."""
        if "weights" not in self:
            return x
        return self["weights"].each(x, sizes, noise.get("weights"))

    def moments(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        sizes: list[int],
        noise: dict[str, torch.Tensor],
        limit: torch.Tensor | float,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Adam's moments [S, P] as the step takes them and as they are kept, [(m, m), (v, v)].

        Rounded each by itself, they can be a quotient that float32 never has: a root of v that has
        become 0, or an m that has been rounded up from almost 0, makes a step of thousands of
        learning rates. So they are rounded in view of each other. `limit` is the quotient
        |m| / sqrt(v) at which a step is as long as the learning rate, a number or [S, 1]:

            v > 0              is kept as the smallest number or more, never as 0
            |m| > limit root   the root is not rounded down
            |m| as kept        is rounded towards 0 where it would be more than limit times the root
                               as kept, and more than |m|
            v saturates        (it has no scale) the step is at most as long as the learning rate

        A moment that is `independent` is rounded by itself.
        """
        limit = SLACK * limit
        m_format = self.get("m")
        v_name = "root" if "root" in self else "v"
        v_format = self.get(v_name)
        m = first.abs()
        root = second.sqrt()
        root_kept = root
        second_kept = second
        second_step = second
        if v_format:
            x = root if v_name == "root" else second
            x_kept = v_format.each(x, sizes, noise.get(v_name))
            if not v_format.independent:
                x_up = v_format.each(x, sizes, torch.zeros_like(x))  # noise of 0 rounds up
                must_not_shrink = (x_kept == 0) | (m > limit * root)
                x_kept = torch.where(must_not_shrink, torch.maximum(x_kept, x_up), x_kept)
            if v_name == "root":
                root_kept = x_kept
                second_kept = x_kept.square()  # exact up to 11 bits of mantissa
            else:
                root_kept = x_kept.sqrt()
                second_kept = x_kept
            if not (v_format.independent or v_format.scaled):
                saturates = x > v_format.format.largest
                at_limit = torch.maximum(second, (m / limit).square())
                second_step = torch.where(saturates, at_limit, second)
        first_kept = first
        if m_format:
            first_kept = m_format.each(first, sizes, noise.get("m"))
            if not m_format.independent:
                most = torch.maximum(m, limit * root_kept)
                down = m_format.each(m, sizes, torch.ones_like(m))  # noise of 1 rounds down
                down = down.copysign(first)
                first_kept = torch.where(first_kept.abs() > most, down, first_kept)
        first_step = first_kept if m_format and "stored" in m_format.words else first
        if v_format and "stored" in v_format.words:
            second_step = second_kept
        return [(first_step, first_kept), (second_step, second_kept)]


def split_entry(entry: str) -> tuple[str, str]:
    """The name of the place, and the format with its words, of an entry such as "v=e5m2:block"."""
    name, _, form = entry.partition("=")
    return name, form


def places_of(text: str, names: tuple[str, ...] = PLACES) -> Places:
    """The places that a text names, such as "weights=e4m3:stochastic v=e5m2".

    They must be among `names`. Raises ValueError for a place, format or word that does not exist, a
    place named twice, or v beside its root.
    """
    places = Places()
    for entry in text.split():
        name, form = split_entry(entry)
        format_name, *words = form.split(":")
        if name not in names:
            raise ValueError(f"formats has the place {name!r}: choose from {', '.join(names)}")
        if name in places or {name, *places} >= {"v", "root"}:
            raise ValueError(f"formats has {name} twice: name each place once, and v or its root")
        of_moments = {*words} & OF_MOMENTS
        if not {*words} <= {*WORDS} or (of_moments and name not in ("m", "v", "root")):
            allowed = f"{', '.join(WORDS)} ({' and '.join(sorted(OF_MOMENTS))}: only m, v, root)"
            raise ValueError(f"formats has {entry!r}: follow the format by any of {allowed}")
        if "stochastic" in words and name not in (*STATE, "targets"):
            only = f"only {', '.join(STATE)} and targets can be stochastic"
            raise ValueError(f"formats has {entry!r}: {only}")
        try:
            places[name] = PlaceFormat(format_of(format_name), tuple(words))
        except ValueError as error:
            raise ValueError(f"formats has {entry!r}: {error}") from error
    return places
