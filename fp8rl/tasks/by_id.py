"""Tasks other than the cart, as tensors, by the name that Gymnasium has for them. A page each: see env.py for what a task is."""

from .acrobot import Acrobot
from .cartpole import CartPole
from .lqr import Lqr
from .pendulum import Pendulum

TASKS = {"CartPole-v1": CartPole, "Acrobot-v1": Acrobot, "Pendulum-v1": Pendulum, "fp8rl/Lqr-v0": Lqr}
