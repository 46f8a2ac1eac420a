"""Tensors as they are stored in few bits: codes, and scales beside them.

Codes are numbers of one of torch's float8 or 16-bit types, or float32 for a format that torch has
no type for. Scales are powers of two: one for the tensor, or one for each block of 32 numbers. They
are float32, or 1 byte of exponent (e8m0) with the word `mx`, as the MX specification has them.
"""

import torch

from .formats import DTYPES, blocks, unblocked
from .places import BLOCK, PlaceFormat

Packed = tuple[torch.Tensor, torch.Tensor | None]  # codes, and scales or None


def pack(x: torch.Tensor, form: PlaceFormat | None) -> Packed:
    """Packs a float32 tensor whose numbers are already rounded to a format.

    Returns codes of the tensor's shape, and scales [] or [blocks], or None if there is no scale.
    """
    dtype = DTYPES.get(form.format.name, torch.float32) if form else torch.float32
    if dtype == torch.float32 or not form.scaled:
        return x.to(dtype, copy=True), None
    flat = x.flatten()
    rows = blocks(flat, BLOCK) if form.block else flat
    scale = form.scale_of(rows.abs().amax(-1))
    rows = rows / scale.unsqueeze(-1)
    flat_codes = unblocked(rows, flat) if form.block else rows
    codes = flat_codes.view(x.shape).to(dtype)
    return codes, scale.to(torch.float8_e8m0fnu) if form.mx else scale


def unpack(codes: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The float32 tensor that `pack` packed, in memory of its own."""
    x = codes.to(torch.float32, copy=True)
    if scale is None:
        return x
    scale = scale.float()
    if not scale.dim():
        return x.mul_(scale)
    flat = x.flatten()
    return unblocked(blocks(flat, BLOCK) * scale.unsqueeze(-1), flat).view(x.shape)
