"""Numbers in few bits, for any training in PyTorch: formats, an optimizer, a doctor."""
