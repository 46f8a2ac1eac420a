"""Tasks: one cart with the Gymnasium API, and other tasks than the cart as tensors."""
