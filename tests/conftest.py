import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fp8rl", deadline=None)  # how fast a machine is must not pass or fail a test
settings.load_profile("fp8rl")


def pytest_runtest_setup(item) -> None:
    """What a test draws must not depend on those before it."""
    torch.manual_seed(0)
