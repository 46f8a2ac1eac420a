"""What `python -m fp8rl COMMAND --help` prints of commands with many options.

It explains the options that a first use needs, and --help-all explains every option.
"""

from typing import NamedTuple

from .. import doctor
from ..build import Machine
from ..config import Config
from ..study.comparison import Comparison
from .throughput import Loop


class ShortHelp(NamedTuple):
    """The essentials of a command.

    `usage`     what to type after the command's name
    `summary`   what the command does
    `options`   what to write after each option, and what it means
    `defaults`  the options' values if they are left out, by name
    """

    usage: str
    summary: str
    options: dict[str, tuple[str, str]]
    defaults: dict[str, object]

    def text(self, command: str) -> str:
        """The page that `python -m fp8rl COMMAND --help` prints."""
        lines = [f"usage: python -m fp8rl {command} {self.usage}", "", self.summary, ""]
        for name, (value, meaning) in self.options.items():
            option = f"--{name.replace('_', '-')} {value}"
            default = self.defaults.get(name)
            if isinstance(default, tuple):
                default = " ".join(map(str, default))
            if value and default is not None:
                meaning = f"{meaning} (default: {default})"
            lines.append(f"  {option:22} {meaning}")
        lines += ["", "--help-all explains every option."]
        return "\n".join(lines)


TASK = ("NAME", "a Gymnasium environment, as CartPole-v1; without it, the built-in cart")
DEVICE = ("NAME", "cpu, or cuda for a GPU")
JSON = ("", "print one JSON object")
RUN = {**vars(Machine()), **vars(Config())}

SHORT_HELP = {
    "train": ShortHelp(
        "--out FOLDER [OPTIONS]",
        "Train one agent. Ctrl-C stops it and leaves a checkpoint, from which --resume continues.",
        {
            "out": ("FOLDER", "where config, metrics, checkpoint and a figure are written"),
            "env_id": TASK,
            "precision": ("NAME", "of matrix products: fp32, tf32, bf16, fp16, fp8, fp8+bf16"),
            "eight_bit": ("", "FP8 products; eight bits for weights, Adam's moments and replay"),
            "steps": ("N", "environment steps to train for"),
            "num_envs": ("N", "environments that are stepped together"),
            "learning_rate": ("X", "Adam's; without it, 0.001 for 64 units, less for more"),
            "seed": ("N", "seed of weights, episodes, actions and replay"),
            "device": DEVICE,
            "tensorboard": ("", "also write an events file for TensorBoard into the folder"),
            "resume": ("FOLDER", "continue a run, to --steps N if given; instead of --out"),
            "overwrite": ("", "replace the run that the folder holds"),
        },
        RUN,
    ),
    "study": ShortHelp(
        "--out FOLDER [OPTIONS]",
        "Train every precision on the same seeds, in batches on every core, and compare them.\n"
        "A study that was stopped continues near where it was when it is called again. With more\n"
        "seeds, precisions or values, it trains those that are new.",
        {
            "out": ("FOLDER", "where results.csv, table.md and curves.png are written"),
            "precisions": ("NAME ...", "what to compare"),
            "seeds": ("N", "agents of each precision"),
            "first_seed": ("N", "seeds run upwards from here"),
            "env_id": TASK,
            "steps": ("N ...", "environment steps to train for"),
            "learning_rate": ("X ...", "Adam's; several values are crossed with the precisions"),
            "controls": ("", "add an arm that must pass and one that must fail"),
            "scheduler": ("ADDRESS", "train on the workers of a Dask cluster"),
            "overwrite": ("", "replace the study that the folder holds"),
        },
        {**vars(Config()), **vars(Comparison())},
    ),
    "doctor": ShortHelp(
        "[OPTIONS]",
        "Train one agent in float32, and predict how it would learn with numbers in few bits.\n"
        "For a script of your own: python -m fp8rl.doctor",
        {
            "judge": ("FORMAT ...", "places and formats, as weights=bf16 v=e4m3:unscaled"),
            "require": ("FORMAT ...", "exit with code 2 unless these learn as float32 does"),
            "tolerates": ("LOW HIGH", "factors of the learning rate that this training bears"),
            "env_id": TASK,
            "steps": ("N", "environment steps to train for"),
            "learning_rate": ("X", "Adam's; without it, 0.001 for 64 units, less for more"),
            "seed": ("N", "seed of weights, episodes, actions and replay"),
            "out": ("FOLDER", "where report.md, report.json and report.png are written"),
            "json": JSON,
        },
        {**RUN, "tolerates": doctor.TOLERATES},
    ),
    "memory": ShortHelp(
        "[OPTIONS]",
        "Predict the bytes of a replay ring, allocate it, and measure its bytes.",
        {
            "capacity": ("N", "transitions in the ring"),
            "num_envs": ("N", "environments that are stepped together"),
            "env_id": TASK,
            "codec": ("NAME", "how observations are stored: fp32, bf16, int8, fp8, ..."),
            "extra_features": ("N", "more features of the built-in cart's observation"),
            "layout": ("NAME", "compact as in training; full and delta to compare"),
            "memmap": ("FOLDER", "keep the ring in files of this folder"),
            "json": JSON,
        },
        {**RUN, "layout": "compact"},
    ),
    "bench": ShortHelp(
        "[OPTIONS]",
        "Measure how fast this machine trains without replay.",
        {
            "num_envs": ("N", "environments of each agent"),
            "rollout_length": ("N", "steps of each environment in an iteration"),
            "precision": ("NAME", "of the matrix products; without it, the fastest here"),
            "agents": ("N", "agents that train as one batch; without it, a single run"),
            "hidden_size": ("N ...", "units in each layer; each value is measured"),
            "device": DEVICE,
            "seconds": ("X", "how long to measure"),
            "json": JSON,
        },
        {**vars(Machine()), **vars(Loop()), "seconds": 5.0},
    ),
}
