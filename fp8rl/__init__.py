"""Low-precision reinforcement learning that can be stepped through in one notebook and checked."""
