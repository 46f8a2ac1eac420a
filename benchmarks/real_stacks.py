"""What do optimizers that people really run do in few bits?

Every line runs the package itself on a CPU, in one thread, and gives a figure beside float32's. The
trainings are the smallest that show it: a tensor of weights that are all equal at first, and
gradients that are given. So a figure says what the arithmetic does, and not how often a network
meets it. The last column is what the doctor says of a training in float32 with such gradients, when
it is asked for the same optimizer.

    python benchmarks/real_stacks.py benchmarks/results/real_stacks.md

It takes some minutes, most of which torch.compile takes, and keeps what it has measured in
real_stacks.csv. The page docs/real_stacks.md says what to do instead. Averages and sums in bfloat16,
and what else a step changes, were measured at commit 9d8312d (results/real_averages.md).
"""

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from results import Journal, table_of, write_tables
from torch import Tensor, nn
from torch.optim import lr_scheduler

from fp8rl.doctor import Doctor

PACKAGES = "torchao", "bitsandbytes", "torch-optimi", "heavyball"
COLUMNS = "section", "package", "what is run", "figure", "in few bits", "in float32", "the doctor"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPE = 64, 64  # the smallest tensor that 8-bit optimizers do not leave in float32

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Training(NamedTuple):
    """Gradients that are given, for one tensor of weights.

    `gradient` takes the number of the step and the weights in float32, and returns a number or a
    tensor of the shape of the weights.
    """

    gradient: Callable[[int, Tensor], Tensor | float] = lambda t, weights: 1.0
    steps: int = 1_000
    start: float = 1.0
    shape: tuple[int, ...] = (8, 8)
    schedule: Callable | None = None  # makes a scheduler of the optimizer
    is_compiled: bool = False

    def weights(self, dtype: torch.dtype) -> nn.Parameter:
        """The weights at the beginning."""
        return nn.Parameter(torch.full(self.shape, self.start, dtype=dtype))

    def train(self, weights: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        """Takes the steps."""
        torch.manual_seed(0)  # for stochastic rounding
        take_step = optimizer.step
        if self.is_compiled:
            torch._dynamo.reset()
            take_step = torch.compile(optimizer.step)
        schedule = self.schedule(optimizer) if self.schedule else None
        for t in range(self.steps):
            gradient = torch.as_tensor(self.gradient(t, weights.detach().float()))
            weights.grad = gradient.expand(self.shape).to(weights.dtype).clone()
            take_step()
            if schedule:
                schedule.step()

    def doctor(self, make: MakeOptimizer, entry: str) -> str:
        """What the doctor says of an entry such as model=bf16, in this training in float32."""
        weights = self.weights(FP32)
        optimizer = make([weights])
        doctor = Doctor(optimizer, formats=(entry,))
        self.train(weights, optimizer)
        (finding,) = doctor.report()
        return f"{entry}: {finding.verdict}: {finding.why}"


class Case(NamedTuple):
    """A training with an optimizer and a type of the weights. A call runs it."""

    training: Training
    make: MakeOptimizer
    dtype: torch.dtype

    def __call__(self, make: MakeOptimizer | None = None, **changes) -> tuple[Tensor, dict]:
        """The weights at the end and their optimizer's state, with some changes of the training."""
        training = self.training._replace(**changes)
        weights = training.weights(self.dtype)
        optimizer = (make or self.make)([weights])
        training.train(weights, optimizer)
        return weights.detach(), optimizer.state[weights]


class Line(NamedTuple):
    """A line of a table: a figure of a training in few bits, and in float32.

    `few`      the optimizer in few bits
    `dtype`    the type of its weights
    `exact`    the optimizer in float32; by default the same
    `read`     takes a Case, and returns the figure; by default the mean of the weights at the end
    `entry`    an entry of which the doctor is asked
    `watched`  the training and the optimizer in which it is asked; by default the same in float32
    """

    package: str
    run: str
    figure: str
    training: Training = Training()
    few: MakeOptimizer | None = None
    dtype: torch.dtype = BF16
    exact: MakeOptimizer | None = None
    read: Callable[[Case], float | str] = lambda run: mean(run()[0])
    entry: str = ""
    watched: tuple[Training, MakeOptimizer] | None = None

    def measure(self) -> list[str]:
        """The cells in few bits and in float32, and what the doctor says."""
        exact = self.exact or self.few
        cells = []
        for make, dtype in ((self.few, self.dtype), (exact, FP32)):
            figure = self.read(Case(self.training, make, dtype))
            cells.append(figure if isinstance(figure, str) else number(figure))
        training, make = self.watched or (self.training, exact)
        return [*cells, training.doctor(make, self.entry) if self.entry else ""]


def noise(mean: float = 0.0, scale: float = 1.0) -> Callable[[int, Tensor], Tensor]:
    """Gradients from N(mean, scale), the same in every run."""

    def gradient(t: int, weights: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(t)
        return mean + scale * torch.randn(weights.shape, generator=generator, dtype=FP32)

    return gradient


def constant(gradient: float) -> Callable[[int, Tensor], float]:
    return lambda t, weights: gradient


def falling(steps: int) -> Callable[[int, Tensor], float]:
    """1 for some steps, and 1e-3 after them."""
    return lambda t, weights: 1.0 if t < steps else 1e-3


def one_large(stop: int) -> Callable[[int, Tensor], Tensor]:
    """In each block of 256, one gradient is 1 and the others are 1e-4, or 0 from a step on."""

    def gradient(t: int, weights: Tensor) -> Tensor:
        gradient = torch.full((weights.numel() // 256, 256), 1e-4 if t < stop else 0.0)
        gradient[:, 0] = 1.0
        return gradient.view(weights.shape)

    return gradient


def every_other(t: int, weights: Tensor) -> Tensor:
    """0 and 1 in turn, so that both are in each block."""
    return (torch.arange(weights.numel()) % 2.0).view(weights.shape)


def made(kind: type, **options) -> MakeOptimizer:
    return lambda parameters: kind(parameters, **options)


def adam(**options) -> MakeOptimizer:
    return made(torch.optim.Adam, **options)


def one_cycle(momentum: bool) -> Callable:
    """A schedule that changes the momentum, too, or the learning rate alone."""
    return lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=1_001, cycle_momentum=momentum
    )


CYCLES = {True: "momentum, too", False: "the learning rate alone"}


def mean(x: Tensor) -> float:
    return x.detach().float().mean().item()


def number(x: float) -> str:
    """Three digits are enough."""
    return f"{x:,.0f}" if 100 <= abs(x) < 1e6 else f"{x:.3g}"


def state(name: str) -> Callable[[Case], float]:
    """What reads the mean of a part of the optimizer's state at the end of a training."""
    return lambda run: mean(run()[1][name])


def torch_optimizers() -> list[Line]:
    """torch's own optimizers on parameters of 16 bits, as after model.bfloat16()."""
    how_of = {"loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    v = state("exp_avg_sq")  # the second moment

    def v_left(run: Case) -> float:
        return v(run) / mean(run(steps=2_000)[1]["exp_avg_sq"])

    # v's step, 0.001 of the distance, is less than half a place of bfloat16
    lines = [
        Line(
            "torch",
            "Adam, beta2 0.999, bf16, loop",
            "v, 5,000 steps after the gradient fell from 1 to 1e-3, of its peak",
            Training(falling(2_000), 7_000),
            adam(lr=0.0),
            read=v_left,
            entry="model=bf16:loop",
            watched=(Training(falling(500), 4_000, 0.0), adam(lr=1e-3)),
        )
    ]
    lines += [
        Line(
            "torch",
            f"Adam, beta2 0.999, bf16, {how}",
            f"v of gradients from N(0, 1), after {steps:,} steps",
            Training(noise(), steps, shape=(16, 16)),
            adam(lr=0.0, fused=how == "fused"),
            exact=adam(lr=0.0),
            read=v,
            entry=f"model=bf16:{how}",
            watched=(Training(noise(0.1), 4_000, 0.0), adam(lr=1e-3)),
        )
        for how in ("loop", "fused")
        for steps in (5_000, 30_000)
    ]
    # A step of 0.003 from 1.0 on, where numbers of bfloat16 are 0.0039 and 0.0078 apart
    figure = "weight 1.0 after 1,000 steps of 0.003"
    exact = adam(lr=3e-3)
    lines += [
        Line(
            "torch",
            f"Adam, bf16, {how}",
            figure,
            few=adam(lr=3e-3, **options),
            exact=exact,
            entry=f"model=bf16:{how}",
        )
        for how, options in how_of.items()
    ]
    # At -2.0 the fused step has overtaken float32, and stops: its v is too small
    for how in ("loop", "fused"):
        few = adam(lr=3e-3, **how_of[how])
        line = Line("torch", f"Adam, bf16, {how}", "", Training(steps=1_500), few, exact=exact)
        lines += [
            line._replace(figure="v of a constant gradient of 1, after 1,500 steps", read=v),
            line._replace(
                figure="weight 1.0 after 1,500 steps of 0.003", entry=f"model=bf16:{how}"
            ),
        ]
    few = "Adam, bf16, compiled step"
    lines.append(Line("torch", few, figure, Training(is_compiled=True), exact))
    lines += [
        Line(
            "torch",
            f"{few}, OneCycleLR that cycles {words}",
            "weight 1.0 after 1,000 steps of at most 0.003",
            Training(is_compiled=True, schedule=one_cycle(momentum)),
            exact,
        )
        for momentum, words in CYCLES.items()
    ]
    lines += [
        Line(
            "torch",
            f"{kind.__name__}, bf16",
            "weight 1.0 after 1,000 steps at the learning rate 0.003",
            few=made(kind, lr=3e-3),
            entry="model=bf16",
        )
        for kind in (torch.optim.NAdam, torch.optim.Muon)
    ]
    lines += [
        Line(
            "torch",
            f"AdamW, bf16, {how}",
            "weight 1.0 after 1,000 steps of a decay of 0.002",
            Training(constant(0.0)),
            made(torch.optim.AdamW, lr=0.02, weight_decay=0.1, **options),
            exact=made(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
            entry=f"model=bf16:{how}",
        )
        for how, options in how_of.items()
    ]

    def sgd(lr: float, **options) -> MakeOptimizer:
        return made(torch.optim.SGD, lr=lr, momentum=0.9, **options)

    def share_that_moves(run: Case) -> str:
        shares = [mean(run(make=sgd(lr, fused=True))[0] != 1.0) for lr in (1e-3, 1.0, 1e3)]
        return ", ".join(f"{share:.0%}" for share in shares)

    lines += [
        Line(
            "torch",
            f"SGD, {name}, fused",
            "weights that move in 20 steps, at the learning rates 0.001, 1 and 1,000",
            Training(noise(), 20),
            dtype=dtype,
            read=share_that_moves,
            entry=f"model={name}:fused",
            watched=(Training(noise(), 200), sgd(0.1)),
        )
        for name, dtype in (("bf16", BF16), ("fp16", FP16))
    ]
    # Moments that underflow, stop or cancel
    adagrad = made(torch.optim.Adagrad, lr=1e-2)
    lines += [
        Line(
            "torch",
            "Adam, fp16",
            "weight 1.0 after 300 steps of 0.003 with gradients of 1e-3",
            Training(constant(1e-3), 300),
            exact,
            FP16,
            entry="model=fp16",
        ),
        Line(
            "torch",
            "Adagrad, bf16",
            "sum of 10,000 squared gradients of 1",
            Training(steps=10_000, start=0.0),
            adagrad,
            read=state("sum"),
            entry="model=bf16",
            watched=(Training(steps=4_000, start=0.0), adagrad),
        ),
        Line(
            "torch",
            "RMSprop, centered, bf16",
            "weights that are NaN after 300 gradients from N(1, 0.1)",
            Training(noise(1.0, 0.1), 300, shape=(16, 16)),
            made(torch.optim.RMSprop, lr=1e-4, alpha=0.95, centered=True),
            read=lambda run: f"{mean(run()[0].isnan()):.0%}",
            entry="model=bf16",
        ),
    ]
    return lines + [
        Line(
            "torch",
            "Adafactor, bf16",
            f"weight 0.1 after 100 steps with gradients from N({size:g}, {size:g})",
            Training(noise(size, size), 100, 0.1),
            made(torch.optim.Adafactor, lr=1e-2),
            entry="model=bf16",
        )
        for size in (1e-2, 1e-3, 1e-4)
    ]


# Optimizers that were made for few bits


def last_step(run: Case) -> float:
    """The mean length of the last step of the small ones, in learning rates."""
    is_small = one_large(1)(0, torch.empty(SHAPE)) < 1
    moved = run()[0] - run(steps=run.training.steps - 1)[0]
    return mean(moved.abs()[is_small]) / 1e-3


def with_eight_bits(run: Case) -> str:
    """Which tensors have eight bits."""
    names = []
    for size in (4_095, 4_096, 4_100, 4_352):
        parts = run(shape=(size,))[1].values()
        if any(hasattr(x, "codes") or getattr(x, "dtype", None) == torch.uint8 for x in parts):
            names.append(f"{size:,}")
    return " and ".join(names)


def in_default_type(run: Case) -> tuple[Tensor, dict]:
    """The end of a training in float32, while torch's default type is that of the case."""
    torch.set_default_dtype(run.dtype)
    try:
        return run._replace(dtype=FP32)()
    finally:
        torch.set_default_dtype(FP32)


def compilations(run: Case) -> str:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run()
    return str(torch._dynamo.utils.counters["stats"]["unique_graphs"] or "")


def few_bit_states() -> list[Line]:
    """Optimizers that were made for few bits."""
    import bitsandbytes
    import heavyball
    import optimi
    import torchao.optim

    tiny = Training(steps=500, shape=SHAPE)
    exact = made(torch.optim.AdamW, lr=1e-5, weight_decay=0.0)
    lines = [
        Line(
            package,
            run,
            "how far a weight of 1.0 moves in 500 steps of 1e-5",
            tiny,
            few,
            exact=exact,
            read=lambda run: mean(run()[0]) - 1.0,
            entry=f"optimizer={entry}",
        )
        for package, run, few, entry in (
            (
                "torch-optimi",
                "AdamW, bf16, Kahan sum",
                made(optimi.AdamW, lr=1e-5, weight_decay=0.0),
                "optimi-kahan",
            ),
            (
                "torchao",
                "_AdamW, bf16, stochastic rounding",
                made(torchao.optim._AdamW, lr=1e-5, weight_decay=0.0, bf16_stochastic_round=True),
                "torchao-stochastic",
            ),
            (
                "heavyball",
                "AdamW, bf16",
                made(heavyball.AdamW, lr=1e-5, weight_decay=0.0),
                "heavyball",
            ),
            ("torch", "AdamW, bf16", exact, "torch.optim:AdamW:bf16"),
        )
    ]
    adamw = made(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
    lines += [
        Line(
            "torch-optimi",
            "AdamW, bf16, Kahan sum",
            "weight 1.0 after 4,000 steps of 3e-6",
            Training(steps=4_000, shape=SHAPE),
            made(optimi.AdamW, lr=3e-6, weight_decay=0.0),
            exact=made(torch.optim.AdamW, lr=3e-6, weight_decay=0.0),
            entry="optimizer=optimi-kahan",
        ),
        Line(
            "torch-optimi",
            "AdamW, bf16, Kahan sum",
            "weight 1.0 after 1,000 steps of a decay of 1e-4",
            Training(constant(0.0)),
            made(optimi.AdamW, lr=1e-3, weight_decay=0.1),
            entry="optimizer=optimi-kahan",
            watched=(Training(noise(), 300), adamw),
        ),
    ]
    exact = made(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
    options = {"lr": 1e-3, "weight_decay": 0.0}
    eight = made(torchao.optim.AdamW8bit, **options)
    four = made(torchao.optim.AdamW4bit, **options)
    bnb = made(bitsandbytes.optim.AdamW8bit, **options)
    stacks = {
        "AdamW8bit": ("torchao", eight, "torchao-8bit"),
        "AdamW8bit, block_size=64": (
            "torchao",
            made(torchao.optim.AdamW8bit, block_size=64, **options),
            "torchao-8bit:block_size=64",
        ),
        "AdamWFp8": ("torchao", made(torchao.optim.AdamWFp8, **options), "torchao-fp8"),
        "AdamW4bit": ("torchao", four, "torchao-4bit"),
        "AdamW8bit on a CPU": ("bitsandbytes", bnb, "bnb-8bit"),
    }
    figures = {
        "200th step of the others, in learning rates": (one_large(10**6), 200),
        "step after their gradients stopped, in learning rates": (one_large(200), 201),
    }
    lines += [
        Line(
            package,
            f"{name}; of each 256 gradients one is 1, the others 1e-4",
            figure,
            Training(gradient, steps, 0.0, SHAPE),
            few,
            FP32,
            exact,
            last_step,
            f"optimizer={entry}",
            (Training(gradient, 300, 0.0, SHAPE), exact),
        )
        for name, (package, few, entry) in stacks.items()
        for figure, (gradient, steps) in figures.items()
    ]
    lines += [
        Line(
            "torchao",
            f"{name}, constant gradient {gradient:+g}",
            "weight 0 after 200 steps of 0.001",
            Training(constant(gradient), 200, 0.0, SHAPE),
            few,
            FP32,
            exact,
            entry=f"optimizer={entry}",
        )
        for name, few, entry in (
            ("AdamW4bit", four, "torchao-4bit"),
            ("AdamW8bit", eight, "torchao-8bit"),
        )
        for gradient in (1.0, -1.0)
    ]
    lines += [
        Line(
            "bitsandbytes",
            "Lion8bit on a CPU, the gradient of every other weight is always 0",
            "these weights, 0 at first, after 200 steps of 0.001",
            Training(every_other, 200, 0.0, SHAPE),
            made(bitsandbytes.optim.Lion8bit, **options),
            FP32,
            made(bitsandbytes.optim.Lion, **options),
            lambda run: mean(run()[0].flatten()[::2]),
            "optimizer=bitsandbytes.optim:Lion8bit",
        ),
        *(
            Line(
                package,
                name,
                "tensors that get 8 bits, of those with 4,095, 4,096, 4,100 and 4,352 numbers",
                Training(steps=1),
                few,
                FP32,
                exact,
                with_eight_bits,
                f"optimizer={entry}",
                (Training(noise(), 64, shape=(4_100,)), exact),
            )
            for name, (package, few, entry) in stacks.items()
            if few in (eight, bnb)
        ),
        # Small tensors of a bf16 model: their moments have its type
        Line(
            "torchao",
            "AdamW8bit on a bf16 tensor of 64 numbers",
            "v, 5,000 steps after the gradient fell from 1 to 1e-3",
            Training(falling(2_000), 7_000),
            eight,
            exact=exact,
            read=state("exp_avg_sq"),
            entry="optimizer=torchao-8bit:bf16",
            watched=(Training(falling(500), 4_000, 0.0), exact),
        ),
    ]
    # torchao counts steps in the default type
    drift = Training(noise(1.0, 1.0), 1_500, 0.0, SHAPE)
    lines += [
        Line(
            "torchao",
            "AdamW8bit on float32 weights, set_default_dtype(bfloat16)",
            figure,
            drift,
            eight,
            read=read,
        )
        for figure, read in {
            "steps that it counted, of 1,500": lambda run: in_default_type(run)[1]["step"].item(),
            "weight 0 after 1,500 gradients from N(1, 1) at 0.001": lambda run: mean(
                in_default_type(run)[0]
            ),
        }.items()
    ]
    return lines + [
        Line(
            "torchao",
            f"AdamW8bit, OneCycleLR that cycles {words}",
            "compilations in 4 steps",
            Training(steps=4, shape=SHAPE, schedule=one_cycle(momentum)),
            eight,
            FP32,
            exact,
            compilations,
        )
        for momentum, words in CYCLES.items()
    ]


SECTIONS = {
    "torch's optimizers on parameters of 16 bits, as after `model.bfloat16()`": torch_optimizers,
    "Optimizers that were made for few bits": few_bit_states,
}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    # All packages are imported here, before anything is measured
    sections = {section: lines_of() for section, lines_of in SECTIONS.items()}
    journal = Journal(out.with_suffix(".csv"), COLUMNS)
    done = journal.done(*COLUMNS[:4])
    parts = []
    for section, lines in sections.items():
        for line in lines:
            names = section, line.package, line.run, line.figure
            if names not in done:
                cells = [*names, *line.measure()]
                print(" | ".join(cells[1:]), flush=True)
                journal.add(dict(zip(COLUMNS, cells, strict=True)))
        rows = [list(row.values())[1:] for row in journal.rows() if row["section"] == section]
        parts += [f"{section}:", table_of(COLUMNS[1:], rows)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    write_tables(out, *parts, more=f"; {versions}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
