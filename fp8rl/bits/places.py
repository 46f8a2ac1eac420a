"""Places: the numbers of a training that can be kept or computed in few bits.

Each place can have a format of its own (formats.py):

    forward        inputs and weights of the matmuls of the forward pass; their products are summed
                   in float32
    backward       the gradients that are multiplied in the backward pass
    weights        the parameters between updates, instead of a float32 master copy
    m, v           Adam's moments between updates
    root           the square root of v, in place of v; it needs only half of v's range of exponents
    observations   observations in replayed slices, in reinforcement learning
    acting         inputs and weights of the matmuls of the policy that acts; without a format, it
                   acts in the format of `forward`
    targets        advantages and value targets

A text such as "weights=e4m3:stochastic v=e5m2" names places and their formats, and `places_of`
reads it. Places that it does not name stay float32, and so do sums. An update takes its step in
float32 from what is stored, and rounds the result. A format may be followed by any of these words:

    unscaled     There is no scale. Otherwise each tensor has one, a power of two.
    stochastic   Numbers are rounded up or down at random, so that the mean is right.
    nearest      Numbers are rounded to the nearest. This is what happens without either word, too,
                 but for v and root in `LowBitAdam` (below).
    stored       (m, v, root) Adam's step is taken from the moments after they are rounded.
                 Otherwise it is taken just before.
    independent  (m, v, root) A moment is rounded without regard to the other moment, as most
                 low-bit optimizers do. Otherwise m and v are rounded so that no step becomes much
                 longer than float32's (`Places.moments`).

To the nearest, v and its root do not fall. An update multiplies v by beta2 = 0.999, and with up to
7 bits of mantissa 0.999 v is rounded to v again. If the gradients of a tensor fall from 1 to 0.001,
v stays at its peak for ever, and steps are a thousand times too short. So `LowBitAdam` and
`config.EIGHT_BIT` round it stochastically, which needs 4 bytes of noise a number in an update.

A float32 scale, as most low-bit optimizers have, would need no noise. With it v falls, too, if a
whole tensor falls at once. But if half of the tensor falls, v of that half is 140 times
too large after 5,000 updates with a root in e4m3; stochastically it is 1.2 times too large. Without
a fall, with gradients from a normal distribution, the mean of v is then 0.65 of float32's to the
nearest, 1.05 with a float32 scale, and 0.99 stochastically.
"""

from typing import NamedTuple

import torch

from .formats import Format, rounded, scaled
from .notation import NAMES, PLACES, STATE, Entry, read_entries, read_entry

# Factor on the limit of Adam's step in `Places.moments`. A first step is exactly as long as the
# learning rate, so without some slack the order of roundings would decide.
SLACK = 1.01
NO_NOISE: dict[str, torch.Tensor] = {}
SHORT_NAMES = {bits: name for name, bits in NAMES.items()}


class PlaceFormat(NamedTuple):
    """How the numbers of one place are kept: a format and the words after it.

    The word "nearest" is left out, because it says what happens without it, too.
    """

    format: Format
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> "PlaceFormat":
        """The format and words in a text such as "e4m3:unscaled"."""
        return cls.of_entry(read_entry("m", text))  # a place that may have every word

    @classmethod
    def of_entry(cls, entry: Entry) -> "PlaceFormat":
        words = tuple(word for word in entry.words if word != "nearest")
        return cls(Format(*entry.bits), words)

    def __str__(self) -> str:
        name = SHORT_NAMES.get(self.format.name, self.format.name)
        return ":".join((name, *self.words))

    @property
    def scaled(self) -> bool:
        """Whether there is a scale.

        With 8 exponent bits there is none. They are as many as float32 has, so a scale would do
        nothing.
        """
        return "unscaled" not in self.words and self.format.exponent < 8

    @property
    def independent(self) -> bool:
        """Whether a moment of Adam is rounded without regard to the other one."""
        return "independent" in self.words

    @property
    def stochastic(self) -> bool:
        return "stochastic" in self.words

    def __call__(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Rounds tensors, each flattened to a row of float32 [S, P].

        With `noise` [S, P], uniform in [0, 1), they are rounded stochastically.
        """
        if not self.scaled:
            return rounded(x, self.format, noise)
        return scaled(x, self.format, noise)

    def each(
        self, x: torch.Tensor, sizes: list[int], noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rounds rows [S, P] that hold several tensors, of given sizes, one after the other."""
        parts = x.split(sizes, dim=1)
        noises = [None] * len(sizes) if noise is None else noise.split(sizes, dim=1)
        rounded_parts = [self(part, n) for part, n in zip(parts, noises, strict=True)]
        return torch.cat(rounded_parts, dim=1)

    def matrices(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Rounds matrices [S, M, N]; with `noise` [S, M N], stochastically."""
        return self(x.flatten(1), noise).view_as(x)


class Places(dict[str, PlaceFormat]):
    """The places of a training that are kept in few bits, with their formats."""

    def __str__(self) -> str:
        """The text that `places_of` reads."""
        return " ".join(f"{name}={form}" for name, form in self.items())

    @property
    def noisy(self) -> list[str]:
        """The places of an optimizer (STATE) that are rounded stochastically."""
        return [name for name in STATE if name in self and self[name].stochastic]

    def weights(
        self, x: torch.Tensor, sizes: list[int], noise: dict[str, torch.Tensor] = NO_NOISE
    ) -> torch.Tensor:
        """Parameters [S, P] as they are kept: rounded, if weights have a format.

        A row holds tensors of given sizes, one after the other.
        """
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

        If each moment were rounded by itself, their quotient could be one that float32 never has. A
        root of v that has become 0, or an m that has been rounded up from almost 0, makes a step of
        thousands of learning rates. So the moments are rounded in view of each other. `limit` is
        the quotient |m| / sqrt(v) at which a step is as long as the learning rate, a number or
        [S, 1]:

            v > 0              v is kept as the smallest number or more, never as 0
            |m| > limit root   the root is not rounded down
            |m| as kept        is rounded towards 0 where it would be more than limit times the root
                               as kept, and more than |m|
            v kept at the      (it has no scale) v may have been larger, so the step is at most as
            largest number     long as the learning rate

        A moment whose format is `independent` is rounded by itself.
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
            if not (v_format.scaled or v_format.independent):
                saturates = x_kept >= v_format.format.largest
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


def places_of(text: str, names: tuple[str, ...] = PLACES) -> Places:
    """Reads the places and formats of a text such as "weights=e4m3:stochastic v=e5m2".

    `names` are the places that are allowed. Raises ValueError for a place, format or word that does
    not exist, for a place that is named twice, and for v beside its root.
    """
    entries = read_entries(text, names)
    return Places({entry.place: PlaceFormat.of_entry(entry) for entry in entries})
