"""The page that `python -m fp8rl` prints.

The page is printed before anything is imported that takes long to import or may be missing.
"""

# What each command does, in the order in which a newcomer needs them.
COMMANDS = {
    "train": "train one agent into a folder, or continue a run that was stopped",
    "eval": "evaluate a trained agent, or film it",
    "study": "compare precisions over many seeds, with a table and learning curves",
    "doctor": "predict how a training would learn with its numbers in few bits",
    "memory": "predict the bytes of a replay buffer, and measure them",
    "bench": "measure how fast this machine trains",
}

EXAMPLES = (
    "python -m fp8rl train --out runs/a",
    "python -m fp8rl train --env-id CartPole-v1 --precision fp8 --out runs/b",
    "python -m fp8rl eval runs/b --film agent.gif",
)

PAGE = """\
fp8rl trains reinforcement learning agents in float32, bfloat16, float16 or FP8,
and measures what few bits cost.

usage: python -m fp8rl COMMAND [OPTIONS]

COMMANDS

examples:
EXAMPLES

python -m fp8rl COMMAND --help explains the options of a command."""


def page():
    """The page as text."""
    commands = ["  " + name.ljust(8) + " " + what for name, what in COMMANDS.items()]
    text = PAGE.replace("COMMANDS", "\n".join(commands))
    return text.replace("EXAMPLES", "\n".join("  " + example for example in EXAMPLES))


def is_wanted(words):
    """Whether this page answers a command line with these words after the program's name."""
    return not words or words[0] in ("-h", "--help", "--help-all")
