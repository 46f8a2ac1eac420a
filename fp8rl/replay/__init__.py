"""Stores what was collected, to learn from it again: the ring, its codecs, and three layouts.

ring.py               `ReplayBuffer`, which stores each observation once
observation_codec.py  how observations are stored in fewer bytes
layouts.py            the ring beside a full and a delta layout, with predicted bytes
"""

from .ring import ReplayBuffer

__all__ = ["ReplayBuffer"]
