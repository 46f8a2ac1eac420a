"""What do optimizers, averages and sums that people really run do in few bits?

Every line runs the package itself on a CPU, in one thread, and gives a figure beside float32's. The
trainings are the smallest that show it: a tensor of weights that are all equal at first, and
gradients that are given. So a figure says what the arithmetic does, and not how often a network
meets it. The last column is what the doctor says of a training in float32 with such gradients, when
it is asked for the same optimizer.

    python benchmarks/real_stacks.py benchmarks/results/real_stacks.md

It takes some minutes, most of which torch.compile takes, and keeps what it has measured in
real_stacks.csv. The page docs/real_stacks.md says what to do instead.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from files import Journal, table_of
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from fp8rl.doctor import Doctor
from fp8rl.machine.hardware import origin

# What is imported -> its name for pip
PACKAGES = {
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "optimi": "torch-optimi",
    "heavyball": "heavyball",
    "schedulefree": "schedulefree",
    "pytorch_optimizer": "pytorch_optimizer",
    "ema_pytorch": "ema-pytorch",
}
COLUMNS = "section", "package", "what is run", "figure", "in few bits", "in float32", "the doctor"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPE = 64, 64  # the smallest tensor that 8-bit optimizers do not leave in float32
SMALL = 8, 8  # for all others

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Training(NamedTuple):
    """Gradients that are given, for one tensor of weights.

    `gradient` takes the number of the step and the weights in float32, and returns a number or a
    tensor of the shape of the weights.
    """

    gradient: Callable[[int, Tensor], Tensor | float]
    steps: int
    start: float = 1.0
    shape: tuple[int, ...] = SMALL

    def weights(self, dtype: torch.dtype = FP32) -> nn.Parameter:
        """The weights at the beginning."""
        return nn.Parameter(torch.full(self.shape, self.start, dtype=dtype))

    def run(
        self,
        make: MakeOptimizer,
        dtype: torch.dtype = FP32,
        step: Callable | None = None,
        scheduler: Callable | None = None,
    ) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        """The weights at the end, and their optimizer.

        Args:
            step: takes the optimizer and returns what is called for a step, such as
                `torch.compile(optimizer.step)`.
            scheduler: takes the optimizer.
        """
        weights = self.weights(dtype)
        optimizer = make([weights])
        take_step = step(optimizer) if step else optimizer.step
        self.train(weights, optimizer, take_step, scheduler(optimizer) if scheduler else None)
        return weights, optimizer

    def train(self, weights: nn.Parameter, optimizer, take_step: Callable, schedule=None) -> None:
        """Takes the steps."""
        if hasattr(optimizer, "train"):  # Schedule-Free
            optimizer.train()
        for t in range(self.steps):
            gradient = torch.as_tensor(self.gradient(t, weights.detach().float()))
            weights.grad = gradient.expand(self.shape).to(weights.dtype).clone()
            take_step()
            if schedule:
                schedule.step()

    def doctor(self, make: MakeOptimizer, entry: str) -> Callable[[], str]:
        """What measures what the doctor says of an entry such as model=bf16, in this training in
        float32."""

        def finding() -> str:
            weights = self.weights()
            optimizer = make([weights])
            doctor = Doctor(optimizer, formats=(entry,))
            self.train(weights, optimizer, optimizer.step)
            (finding,) = doctor.report()
            return f"{entry}: {finding.verdict}: {finding.why}"

        return finding


class Section:
    """The lines of one table. Those that are in the journal are not measured again."""

    def __init__(self, name: str, journal: Journal):
        self.name = name
        self.journal = journal
        self.done = journal.done("section", "package", "what is run", "figure")

    def add(
        self,
        package: str,
        run: str,
        figure: str,
        few_bits: Callable[[], str],
        float32: Callable[[], str],
        doctor: Callable[[], str] = lambda: "",
    ) -> None:
        """Measures a line: the figure in few bits and in float32, and what the doctor says."""
        names = self.name, package, run, figure
        if names in self.done:
            return
        cells = [*names, few_bits(), float32(), doctor()]
        print(" | ".join(cells[1:]), flush=True)
        self.journal.add(dict(zip(COLUMNS, cells, strict=True)))

    def table(self) -> str:
        rows = [row for row in self.journal.rows() if row["section"] == self.name]
        return table_of(COLUMNS[1:], [list(row.values())[1:] for row in rows])


def constant(gradient: float) -> Callable[[int, Tensor], float]:
    """The same gradient at every step."""
    return lambda t, weights: gradient


def noise(mean: float = 0.0, scale: float = 1.0) -> Callable[[int, Tensor], Tensor]:
    """Gradients from N(mean, scale), the same in every run."""

    def gradient(t: int, weights: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(t)
        draw = torch.randn(weights.shape, generator=generator, dtype=FP32)
        return mean + scale * draw

    return gradient


def falling(steps: int) -> Callable[[int, Tensor], float]:
    """1 for some steps, and 1e-3 after them."""
    return lambda t, weights: 1.0 if t < steps else 1e-3


def quadratic(scale: float) -> Callable[[int, Tensor], Tensor]:
    """Of the loss w**2 / 2, with noise from N(0, scale)."""
    draw = noise(0.0, scale)
    return lambda t, weights: weights + draw(t, weights)


def one_large(t: int, weights: Tensor) -> Tensor:
    """In each block of 256, one gradient is 1 and the others are 1e-4."""
    gradient = torch.full((weights.numel() // 256, 256), 1e-4)
    gradient[:, 0] = 1.0
    return gradient.view(weights.shape)


def one_large_stops(last: int) -> Callable[[int, Tensor], Tensor]:
    """`one_large`, but the small gradients are 0 from a step on."""

    def gradient(t: int, weights: Tensor) -> Tensor:
        large_and_small = one_large(t, weights)
        return large_and_small if t < last else torch.where(large_and_small == 1, 1.0, 0.0)

    return gradient


def adam(**options) -> MakeOptimizer:
    return lambda parameters: torch.optim.Adam(parameters, **options)


def compiled(optimizer: torch.optim.Optimizer) -> Callable:
    """The optimizer's step, compiled."""
    torch._dynamo.reset()
    return torch.compile(optimizer.step)


def mean(x: Tensor) -> float:
    return x.detach().float().mean().item()


def number(x: float) -> str:
    """Three digits are enough."""
    return f"{x:,.0f}" if 100 <= abs(x) < 1e6 else f"{x:.3g}"


def mean_at_end(
    training: Training, make: MakeOptimizer, dtype=FP32, **options
) -> Callable[[], str]:
    """What measures the mean of the weights at the end of a training."""
    return lambda: number(mean(training.run(make, dtype, **options)[0]))


def of_state(training: Training, make: MakeOptimizer, dtype, name: str) -> Callable[[], str]:
    """What measures the mean of a part of the optimizer's state at the end of a training."""

    def measure() -> str:
        weights, optimizer = training.run(make, dtype)
        return number(mean(optimizer.state[weights][name]))

    return measure


def torch_optimizers(section: Section) -> None:
    """torch's own optimizers on parameters of 16 bits, as after model.bfloat16()."""

    def add(
        run: str, figure: str, few_bits: Callable, float32: Callable, doctor=lambda: ""
    ) -> None:
        section.add("torch", run, figure, few_bits, float32, doctor)

    # v is the second moment. Its step, 0.001 of the distance, is less than half a place of bfloat16.
    falls_after = falling(2_000)

    def v_left(dtype: torch.dtype) -> Callable[[], str]:
        def measure() -> str:
            v = []
            for steps in (2_000, 7_000):
                weights, optimizer = Training(falls_after, steps).run(adam(lr=0.0), dtype)
                v.append(mean(optimizer.state[weights]["exp_avg_sq"]))
            return number(v[1] / v[0])

        return measure

    add(
        "Adam, beta2 0.999, bf16, loop",
        "v, 5,000 steps after the gradient fell from 1 to 1e-3, of its peak",
        v_left(BF16),
        v_left(FP32),
        Training(falling(500), 4_000, 0.0).doctor(adam(lr=1e-3), "model=bf16:loop"),
    )
    for how in ("loop", "fused"):
        for steps in (5_000, 30_000):
            training = Training(noise(), steps, shape=(16, 16))
            watched = Training(noise(0.1), 4_000, 0.0)
            add(
                f"Adam, beta2 0.999, bf16, {how}",
                f"v of gradients from N(0, 1), after {steps:,} steps",
                of_state(training, adam(lr=0.0, fused=how == "fused"), BF16, "exp_avg_sq"),
                of_state(training, adam(lr=0.0), FP32, "exp_avg_sq"),
                watched.doctor(adam(lr=1e-3), f"model=bf16:{how}"),
            )

    # A step of 0.003 from 1.0 on, where numbers of bfloat16 are 0.0039 and 0.0078 apart
    falls = Training(constant(1.0), 1_000)
    figure = "weight 1.0 after 1,000 steps of 0.003"
    for how in ("loop", "foreach", "fused"):
        options = {} if how == "loop" else {how: True}
        add(
            f"Adam, bf16, {how}",
            figure,
            mean_at_end(falls, adam(lr=3e-3, **options), BF16),
            mean_at_end(falls, adam(lr=3e-3)),
            falls.doctor(adam(lr=3e-3), f"model=bf16:{how}"),
        )
    # At -2.0 the fused step has overtaken float32, and stops: its v is too small.
    longer = Training(constant(1.0), 1_500)
    for how in ("loop", "fused"):
        fused = how == "fused"
        add(
            f"Adam, bf16, {how}",
            "v of a constant gradient of 1, after 1,500 steps",
            of_state(longer, adam(lr=3e-3, fused=fused), BF16, "exp_avg_sq"),
            of_state(longer, adam(lr=3e-3), FP32, "exp_avg_sq"),
        )
        add(
            f"Adam, bf16, {how}",
            "weight 1.0 after 1,500 steps of 0.003",
            mean_at_end(longer, adam(lr=3e-3, fused=fused), BF16),
            mean_at_end(longer, adam(lr=3e-3)),
            longer.doctor(adam(lr=3e-3), f"model=bf16:{how}"),
        )
    add(
        "Adam, bf16, compiled step",
        figure,
        mean_at_end(falls, adam(lr=3e-3), BF16, step=compiled),
        mean_at_end(falls, adam(lr=3e-3)),
    )

    def one_cycle(momentum: bool) -> Callable:
        return lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, 3e-3, total_steps=1_001, cycle_momentum=momentum
        )

    for momentum in (True, False):
        cycles = "momentum, too" if momentum else "the learning rate alone"
        add(
            f"Adam, bf16, compiled step, OneCycleLR that cycles {cycles}",
            "weight 1.0 after 1,000 steps of at most 0.003",
            mean_at_end(falls, adam(lr=3e-3), BF16, step=compiled, scheduler=one_cycle(momentum)),
            mean_at_end(falls, adam(lr=3e-3), scheduler=one_cycle(momentum)),
        )

    def made(kind: type, **options) -> MakeOptimizer:
        return lambda parameters: kind(parameters, **options)

    for kind in (torch.optim.NAdam, torch.optim.Muon):
        make = made(kind, lr=3e-3)
        add(
            f"{kind.__name__}, bf16",
            "weight 1.0 after 1,000 steps at the learning rate 0.003",
            mean_at_end(falls, make, BF16),
            mean_at_end(falls, make),
            falls.doctor(make, "model=bf16"),
        )

    # Weight decay
    decays = Training(constant(0.0), 1_000)
    for how in ("loop", "foreach", "fused"):
        options = {} if how == "loop" else {how: True}
        add(
            f"AdamW, bf16, {how}",
            "weight 1.0 after 1,000 steps of a decay of 0.002",
            mean_at_end(
                decays, made(torch.optim.AdamW, lr=0.02, weight_decay=0.1, **options), BF16
            ),
            mean_at_end(decays, made(torch.optim.AdamW, lr=0.02, weight_decay=0.1)),
            decays.doctor(made(torch.optim.AdamW, lr=0.02, weight_decay=0.1), f"model=bf16:{how}"),
        )

    # Learning rates from tiny to absurd
    def share_that_moves(dtype: torch.dtype) -> Callable[[], str]:
        def measure() -> str:
            shares = []
            for learning_rate in (1e-3, 1.0, 1e3):
                make = made(torch.optim.SGD, lr=learning_rate, momentum=0.9, fused=True)
                weights, _ = Training(noise(), 20).run(make, dtype)
                shares.append(f"{mean(weights != 1.0):.0%}")
            return ", ".join(shares)

        return measure

    for name, dtype in (("bf16", BF16), ("fp16", FP16)):
        make = made(torch.optim.SGD, lr=0.1, momentum=0.9)
        add(
            f"SGD, {name}, fused",
            "weights that move in 20 steps, at the learning rates 0.001, 1 and 1,000",
            share_that_moves(dtype),
            share_that_moves(FP32),
            Training(noise(), 200).doctor(make, f"model={name}:fused"),
        )

    # Moments that underflow, stop or cancel
    small = Training(constant(1e-3), 300)
    add(
        "Adam, fp16",
        "weight 1.0 after 300 steps of 0.003 with gradients of 1e-3",
        mean_at_end(small, adam(lr=3e-3), FP16),
        mean_at_end(small, adam(lr=3e-3)),
        small.doctor(adam(lr=3e-3), "model=fp16"),
    )
    adagrad = made(torch.optim.Adagrad, lr=1e-2)
    ones = Training(constant(1.0), 10_000, 0.0)
    add(
        "Adagrad, bf16",
        "sum of 10,000 squared gradients of 1",
        of_state(ones, adagrad, BF16, "sum"),
        of_state(ones, adagrad, FP32, "sum"),
        Training(constant(1.0), 4_000, 0.0).doctor(adagrad, "model=bf16"),
    )
    rmsprop = made(torch.optim.RMSprop, lr=1e-4, alpha=0.95, centered=True)
    drift = Training(noise(1.0, 0.1), 300, shape=(16, 16))

    def share_of_nan(dtype: torch.dtype) -> Callable[[], str]:
        return lambda: f"{mean(drift.run(rmsprop, dtype)[0].isnan()):.0%}"

    add(
        "RMSprop, centered, bf16",
        "weights that are NaN after 300 gradients from N(1, 0.1)",
        share_of_nan(BF16),
        share_of_nan(FP32),
        drift.doctor(rmsprop, "model=bf16"),
    )
    adafactor = made(torch.optim.Adafactor, lr=1e-2)
    for size in (1e-2, 1e-3, 1e-4):
        training = Training(noise(size, size), 100, 0.1)
        add(
            "Adafactor, bf16",
            f"weight 0.1 after 100 steps with gradients from N({size:g}, {size:g})",
            mean_at_end(training, adafactor, BF16),
            mean_at_end(training, adafactor),
            training.doctor(adafactor, "model=bf16"),
        )


def averages(section: Section) -> None:
    """Running averages of a model in bfloat16, and sums of its gradients."""

    def add(package: str, run: str, figure: str, measure: Callable, doctor=lambda: "") -> None:
        section.add(
            package,
            run,
            figure,
            lambda: number(measure(BF16)),
            lambda: number(measure(FP32)),
            doctor,
        )

    def averaged(steps: int, in_float32: bool = False, **options) -> Callable[[torch.dtype], float]:
        """The average of a weight that jumps from 1 to 2. It has the type of the weight, unless it
        is `in_float32`."""

        def measure(dtype: torch.dtype) -> float:
            model = nn.Linear(4, 4, bias=False).to(dtype)
            model.weight.data.fill_(1.0)
            average = swa_utils.AveragedModel(model, **options)
            if in_float32:
                average.float()
            average.update_parameters(model)
            model.weight.data.fill_(2.0)
            for _ in range(steps):
                average.update_parameters(model)
            return mean(average.module.weight)

        return measure

    def doctor_on_average(share: float) -> Callable[[], str]:
        """What measures what the doctor says of an average in float32 that follows a weight by this
        share of the way."""

        def finding() -> str:
            weight = nn.Parameter(torch.full((4,), 2.0))
            average = torch.full((4,), 1.0)
            optimizer = torch.optim.SGD([weight], lr=1e-3)
            doctor = Doctor(optimizer, formats=("weights=bf16",))
            doctor.follow("average", [average], share, ("bf16",))
            for _ in range(2_000):
                weight.grad = torch.zeros(4)
                optimizer.step()
                average.lerp_(weight.detach(), share)
            (finding,) = (x for x in doctor.report() if x.place == "average")
            return f"average=bf16: {finding.verdict}, rate {finding.rate:.2f}"

        return finding

    for decay in (0.999, 0.99):
        for name in ("get_ema_avg_fn", "get_ema_multi_avg_fn"):
            function = getattr(swa_utils, name)(decay)
            option = {"multi_avg_fn" if "multi" in name else "avg_fn": function}
            add(
                "torch",
                f"AveragedModel of a bf16 model, {name}({decay})",
                "average of a weight that jumped from 1 to 2, 5,000 updates later",
                averaged(5_000, **option),
                doctor_on_average(1 - decay),
            )

    def unless_refused(measure: Callable[[torch.dtype], float]) -> Callable[[], str]:
        """What measures a figure of a bf16 model. If torch refuses, the figure is its error."""

        def figure() -> str:
            try:
                return number(measure(BF16))
            except RuntimeError as error:
                return f"refused: {error}"

        return figure

    for name in ("get_ema_avg_fn", "get_ema_multi_avg_fn"):
        function = getattr(swa_utils, name)(0.999)
        option = {"multi_avg_fn" if "multi" in name else "avg_fn": function}
        section.add(
            "torch",
            f"AveragedModel in float32 of a bf16 model, {name}(0.999)",
            "average of a weight that jumped from 1 to 2, 5,000 updates later",
            unless_refused(averaged(5_000, in_float32=True, **option)),
            lambda option=option: number(averaged(5_000, **option)(FP32)),
        )
    add(
        "torch",
        "AveragedModel of a bf16 model, equal weights (SWA)",
        "average of a weight that jumped from 1 to 2, 2,000 updates later",
        averaged(2_000),
    )

    def target_network(interpolate: Callable) -> Callable[[torch.dtype], float]:
        def measure(dtype: torch.dtype) -> float:
            source = torch.full((4,), 2.0, dtype=dtype)
            target = torch.full((4,), 1.0, dtype=dtype)
            for _ in range(2_000):
                target = interpolate(target, source)
            return mean(target)

        return measure

    figure = "target of a weight that jumped from 1 to 2, 2,000 updates later"
    add(
        "torch",
        "target network, bf16, tau * source + (1 - tau) * target, tau 0.005",
        figure,
        target_network(lambda target, source: 0.005 * source + (1 - 0.005) * target),
        doctor_on_average(0.005),
    )
    add(
        "torch",
        "target network, bf16, target.lerp_(source, 0.005)",
        figure,
        target_network(lambda target, source: target.lerp_(source, 0.005)),
        doctor_on_average(0.005),
    )

    def ema_pytorch(dtype: torch.dtype) -> float:
        from ema_pytorch import EMA

        model = nn.Linear(4, 4, bias=False).to(dtype)
        model.weight.data.fill_(1.0)
        average = EMA(model, beta=0.999, update_after_step=0, update_every=1, power=1.0)
        average.update()
        average.update()
        model.weight.data.fill_(2.0)
        for _ in range(5_000):
            average.update()
        return mean(average.ema_model.weight)

    add(
        "ema-pytorch",
        "EMA of a bf16 model, beta 0.999",
        "average of a weight that jumped from 1 to 2, 5,000 updates later",
        ema_pytorch,
    )

    def running_mean(momentum: float) -> Callable[[torch.dtype], float]:
        def measure(dtype: torch.dtype) -> float:
            layer = nn.BatchNorm1d(8, momentum=momentum).to(dtype)
            batch = torch.tensor([1.0, 3.0]).repeat(8, 1).T  # [2, 8], mean 2
            for _ in range(3_000):
                layer(batch.to(dtype))
            return mean(layer.running_mean)

        return measure

    for momentum in (0.1, 0.01):
        add(
            "torch",
            f"BatchNorm1d of a bf16 model, momentum {momentum}",
            "running mean of a unit whose mean is 2, after 3,000 batches",
            running_mean(momentum),
        )

    import schedulefree

    for learning_rate in (1e-3, 3e-3):
        training = Training(quadratic(1.0), 3_000)

        def schedule_free(parameters: list, lr: float = learning_rate) -> torch.optim.Optimizer:
            return schedulefree.AdamWScheduleFree(parameters, lr=lr)

        def evaluated(dtype: torch.dtype, training=training, make=schedule_free) -> float:
            weights, optimizer = training.run(make, dtype)
            optimizer.eval()
            return mean(weights)

        add(
            "schedulefree",
            f"AdamWScheduleFree, bf16, learning rate {learning_rate:g}",
            "evaluation weight of w²/2 with noisy gradients, from 1.0, after 3,000 steps",
            evaluated,
            training.doctor(schedule_free, "model=bf16"),
        )

    def gradient_sum(average: float) -> Callable[[torch.dtype], float]:
        def measure(dtype: torch.dtype) -> float:
            draw = noise(average)
            total = torch.zeros(SHAPE, dtype=dtype)
            exact = torch.zeros(SHAPE)
            for t in range(4_096):
                gradient = draw(t, exact).to(dtype)
                total += gradient
                exact += gradient.float()
            return ((total.float() * exact).sum() / exact.square().sum()).item()

        return measure

    def doctor_on_sum(average: float) -> Callable[[], str]:
        """What measures what the doctor says of a training by SGD that adds up these gradients in
        float32."""

        def finding() -> str:
            weights = nn.Parameter(torch.zeros(SHAPE))
            optimizer = torch.optim.SGD([weights], lr=1e-3)
            doctor = Doctor(optimizer, formats=("grad=bf16",), length=2)
            draw = noise(average)
            for _ in range(4):
                optimizer.zero_grad()
                for t in range(4_096):
                    (weights * draw(t, weights)).sum().backward()
                optimizer.step()
            (finding,) = doctor.report()
            return f"grad=bf16: {finding.verdict}: {finding.why}"

        return finding

    for average in (1.0, 0.5, 0.1):
        add(
            "torch",
            f"gradients from N({average:g}, 1) of 4,096 micro-batches, added up in bf16",
            "share of the sum that is left",
            gradient_sum(average),
            doctor_on_sum(average),
        )


def few_bit_states(section: Section) -> None:
    """Optimizers that were made for few bits."""
    import bitsandbytes
    import heavyball
    import optimi
    import torchao.optim

    add = section.add

    def made(kind: type, **options) -> MakeOptimizer:
        options = {"weight_decay": 0.0, **options}
        return lambda parameters: kind(parameters, **options)

    # Compensated sums and stochastic rounding
    tiny = Training(constant(1.0), 500, shape=SHAPE)

    def moved(make: MakeOptimizer, dtype: torch.dtype = FP32) -> Callable[[], str]:
        def measure() -> str:
            torch.manual_seed(0)
            return number(mean(tiny.run(make, dtype)[0]) - 1.0)

        return measure

    adamw = made(torch.optim.AdamW, lr=1e-5)
    for package, run, make, entry in (
        ("torch-optimi", "AdamW, bf16, Kahan sum", made(optimi.AdamW, lr=1e-5), "optimi-kahan"),
        (
            "torchao",
            "_AdamW, bf16, stochastic rounding",
            made(torchao.optim._AdamW, lr=1e-5, bf16_stochastic_round=True),
            "torchao-stochastic",
        ),
        ("heavyball", "AdamW, bf16", made(heavyball.AdamW, lr=1e-5), "heavyball"),
        ("torch", "AdamW, bf16", adamw, "torch.optim:AdamW:bf16"),
    ):
        add(
            package,
            run,
            "how far a weight of 1.0 moves in 500 steps of 1e-5",
            moved(make, BF16),
            moved(adamw),
            tiny.doctor(adamw, f"optimizer={entry}"),
        )
    tinier = Training(constant(1.0), 4_000, shape=SHAPE)
    kahan = made(optimi.AdamW, lr=3e-6)
    slow = made(torch.optim.AdamW, lr=3e-6)
    add(
        "torch-optimi",
        "AdamW, bf16, Kahan sum",
        "weight 1.0 after 4,000 steps of 3e-6",
        mean_at_end(tinier, kahan, BF16),
        mean_at_end(tinier, slow),
        tinier.doctor(slow, "optimizer=optimi-kahan"),
    )
    decays = Training(constant(0.0), 1_000)
    decaying = made(optimi.AdamW, lr=1e-3, weight_decay=0.1)
    add(
        "torch-optimi",
        "AdamW, bf16, Kahan sum",
        "weight 1.0 after 1,000 steps of a decay of 1e-4",
        mean_at_end(decays, decaying, BF16),
        mean_at_end(decays, decaying),
        Training(noise(), 300).doctor(
            made(torch.optim.AdamW, lr=1e-3, weight_decay=0.1), "optimizer=optimi-kahan"
        ),
    )

    # One large gradient in a block
    float32 = made(torch.optim.AdamW, lr=1e-3)
    small = one_large(0, torch.empty(SHAPE)) < 1
    stacks = {
        "AdamW8bit": ("torchao", made(torchao.optim.AdamW8bit, lr=1e-3), "torchao-8bit"),
        "AdamW8bit, block_size=64": (
            "torchao",
            made(torchao.optim.AdamW8bit, lr=1e-3, block_size=64),
            "torchao-8bit:block_size=64",
        ),
        "AdamWFp8": ("torchao", made(torchao.optim.AdamWFp8, lr=1e-3), "torchao-fp8"),
        "AdamW4bit": ("torchao", made(torchao.optim.AdamW4bit, lr=1e-3), "torchao-4bit"),
        "AdamW8bit on a CPU": (
            "bitsandbytes",
            made(bitsandbytes.optim.AdamW8bit, lr=1e-3),
            "bnb-8bit",
        ),
    }

    def last_step(make: MakeOptimizer, gradient: Callable, steps: int) -> Callable[[], str]:
        """What measures the mean length of the last step of the small ones, in learning rates."""

        def measure() -> str:
            # Two trainings, one a step longer than the other
            before, _ = Training(gradient, steps - 1, 0.0, SHAPE).run(make)
            after, _ = Training(gradient, steps, 0.0, SHAPE).run(make)
            return number(mean((after - before).detach().abs()[small]) / 1e-3)

        return measure

    stops = one_large_stops(200)
    for name, (package, make, entry) in stacks.items():
        for figure, gradient, steps in (
            ("200th step of the others, in learning rates", one_large, 200),
            ("step after their gradients stopped, in learning rates", stops, 201),
        ):
            add(
                package,
                f"{name}; of each 256 gradients one is 1, the others 1e-4",
                figure,
                last_step(make, gradient, steps),
                last_step(float32, gradient, steps),
                Training(gradient, 300, 0.0, SHAPE).doctor(float32, f"optimizer={entry}"),
            )

    # The sign of the gradient
    for name in ("AdamW4bit", "AdamW8bit"):
        package, make, entry = stacks[name]
        for gradient in (1.0, -1.0):
            training = Training(constant(gradient), 200, 0.0, SHAPE)
            add(
                package,
                f"{name}, constant gradient {gradient:+g}",
                "weight 0 after 200 steps of 0.001",
                mean_at_end(training, make),
                mean_at_end(training, float32),
                training.doctor(float32, f"optimizer={entry}"),
            )

    def every_other(t: int, weights: Tensor) -> Tensor:
        """0 and 1 in turn, so that both are in each block."""
        return (torch.arange(weights.numel()) % 2.0).view(weights.shape)

    def others(make: MakeOptimizer) -> Callable[[], str]:
        def measure() -> str:
            weights, _ = Training(every_other, 200, 0.0, SHAPE).run(make)
            return number(mean(weights.flatten()[::2]))

        return measure

    lion = made(bitsandbytes.optim.Lion, lr=1e-3)
    add(
        "bitsandbytes",
        "Lion8bit on a CPU, the gradient of every other weight is always 0",
        "these weights, 0 at first, after 200 steps of 0.001",
        others(made(bitsandbytes.optim.Lion8bit, lr=1e-3)),
        others(lion),
        Training(every_other, 200, 0.0, SHAPE).doctor(
            lion, "optimizer=bitsandbytes.optim:Lion8bit"
        ),
    )

    # Which tensors have eight bits?
    def with_eight_bits(make: MakeOptimizer, state: str) -> Callable[[], str]:
        def measure() -> str:
            names = []
            for size in (4_095, 4_096, 4_100, 4_352):
                weights, optimizer = Training(constant(1.0), 1, shape=(size,)).run(make)
                moment = optimizer.state[weights][state]
                if moment.dtype == torch.uint8 or hasattr(moment, "codes"):
                    names.append(f"{size:,}")
            return " and ".join(names)

        return measure

    for name, state in (("AdamW8bit", "exp_avg"), ("AdamW8bit on a CPU", "state1")):
        package, make, entry = stacks[name]
        add(
            package,
            name,
            "tensors that get 8 bits, of those with 4,095, 4,096, 4,100 and 4,352 numbers",
            with_eight_bits(make, state),
            lambda: "",
            Training(noise(), 64, shape=(4_100,)).doctor(float32, f"optimizer={entry}"),
        )

    # Small tensors of a bf16 model: their moments have its type.
    fell = Training(falling(2_000), 7_000)
    package, make, entry = stacks["AdamW8bit"]
    add(
        package,
        "AdamW8bit on a bf16 tensor of 64 numbers",
        "v, 5,000 steps after the gradient fell from 1 to 1e-3",
        of_state(fell, make, BF16, "exp_avg_sq"),
        of_state(fell, float32, FP32, "exp_avg_sq"),
        Training(falling(500), 4_000, 0.0).doctor(float32, f"optimizer={entry}:bf16"),
    )

    # torchao counts steps in the default type.
    drift = Training(noise(1.0, 1.0), 1_500, 0.0, SHAPE)

    def counted(default: torch.dtype) -> tuple[float, float]:
        torch.set_default_dtype(default)
        try:
            weights, optimizer = drift.run(make)
        finally:
            torch.set_default_dtype(FP32)
        return optimizer.state[weights]["step"].item(), mean(weights)

    for figure, i in (
        ("steps that it counted, of 1,500", 0),
        ("weight 0 after 1,500 gradients from N(1, 1) at 0.001", 1),
    ):
        add(
            package,
            "AdamW8bit on float32 weights, set_default_dtype(bfloat16)",
            figure,
            lambda i=i: number(counted(BF16)[i]),
            lambda i=i: number(counted(FP32)[i]),
        )

    def compilations(momentum: bool) -> Callable[[], str]:
        def measure() -> str:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            Training(constant(1.0), 4, shape=SHAPE).run(
                make,
                scheduler=lambda optimizer: lr_scheduler.OneCycleLR(
                    optimizer, 3e-3, total_steps=100, cycle_momentum=momentum
                ),
            )
            return str(torch._dynamo.utils.counters["stats"]["unique_graphs"])

        return measure

    for momentum in (True, False):
        cycles = "momentum, too" if momentum else "the learning rate alone"
        add(
            package,
            f"AdamW8bit, OneCycleLR that cycles {cycles}",
            "compilations in 4 steps",
            compilations(momentum),
            lambda: "",
        )


def settings() -> dict[str, object]:
    """What a program has set for all of torch, numpy and Python."""
    import os
    import random

    import numpy
    import torch._dynamo.config
    import torch._inductor.config
    from torch.optim import optimizer

    numpy_state = numpy.random.get_state()
    found = {
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        # The whole states. A draw counts up one number of torch's and counts down another.
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "numpy's generator": (numpy_state[1].tobytes(), numpy_state[2:]),
        "Python's generator": random.getstate(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "TF32": (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
        "einsum": torch.backends.opt_einsum.strategy,
        "warnings": len(warnings.filters),
        "logging": (logging.getLogger().level, len(logging.getLogger().handlers)),
        "hooks of all optimizers": (
            len(optimizer._global_optimizer_pre_hooks),
            len(optimizer._global_optimizer_post_hooks),
        ),
        "environment": str(sorted(os.environ.items())),
    }
    for name in ("dynamo", "inductor"):
        config = getattr(torch, f"_{name}").config
        # An entry that is a set has no order.
        values = {
            key: repr(value)
            for key, value in config.get_config_copy().items()
            if not isinstance(value, set)
        }
        found[f"{name}'s config"] = str(sorted(values.items()))
    return found


def changed_by_import(module: str) -> str:
    """The settings that importing a module changes, in a process of its own."""
    before = settings()
    importlib.import_module(module)
    after = settings()
    changed = [name for name in before if before[name] != after[name]]
    return ", ".join(changed) or "nothing"


def changed_by_step(make: MakeOptimizer, dtype: torch.dtype) -> str:
    """What a step changes beside weights and state."""
    weights = Training(constant(1.0), 1).weights(dtype)
    optimizer = make([weights])
    if hasattr(optimizer, "train"):
        optimizer.train()
    gradient = noise()(0, weights).to(dtype)
    for _ in range(2):  # the first step may compile
        weights.grad = gradient.clone()
        before = settings()
        optimizer.step()
        after = settings()
    changed = [name for name in before if before[name] != after[name]]
    if weights.grad is None:
        changed.append("p.grad (None)")
    elif not torch.equal(weights.grad, gradient):
        changed.append("p.grad")
    return ", ".join(changed) or "nothing"


def side_effects(section: Section) -> None:
    """What importing a package and a step change beside weights and state."""
    import bitsandbytes
    import heavyball
    import optimi
    import pytorch_optimizer
    import schedulefree
    import torchao.optim

    def stochastic(parameters: list) -> torch.optim.Optimizer:
        return torchao.optim.AdamW8bit(parameters, bf16_stochastic_round=True)

    def kahan(parameters: list) -> torch.optim.Optimizer:
        return optimi.AdamW(parameters, lr=1e-3)

    optimizers = {
        "torchao.optim": ("AdamW8bit, stochastic rounding", stochastic),
        "bitsandbytes": ("AdamW8bit on a CPU", bitsandbytes.optim.AdamW8bit),
        "optimi": ("AdamW, with a Kahan sum in bf16", kahan),
        "heavyball": ("AdamW", heavyball.AdamW),
        "schedulefree": ("AdamWScheduleFree", schedulefree.AdamWScheduleFree),
        "pytorch_optimizer": ("StableAdamW", pytorch_optimizer.StableAdamW),
    }
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for module, (name, make) in optimizers.items():
            package = PACKAGES[module.partition(".")[0]]
            section.add(
                package,
                f"import {module}",
                "settings of the process that change",
                lambda module=module: pool.apply(changed_by_import, (module,)),
                lambda: "",
            )
            section.add(
                package,
                f"a step of {name}",
                "what changes beside weights and state",
                lambda make=make: changed_by_step(make, BF16),
                lambda make=make: changed_by_step(make, FP32),
            )


def main(out: Path) -> None:
    missing = [name for name in PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        remedy = "pip install --no-deps -r benchmarks/requirements.txt"
        sys.exit(f"real_stacks needs {' and '.join(missing)}: {remedy}")
    torch.set_num_threads(1)
    journal = Journal(out.with_suffix(".csv"), COLUMNS)
    parts = []
    for heading, measure in SECTIONS.items():
        section = Section(heading, journal)
        measure(section)
        parts += [f"{heading}:", section.table()]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES.values())
    parts.append(f"`python benchmarks/real_stacks.py {out}` on {origin()}; {versions}.")
    out.write_text("\n\n".join(parts) + "\n")


SECTIONS = {
    "torch's optimizers on parameters of 16 bits, as after `model.bfloat16()`": torch_optimizers,
    "Averages and sums in bfloat16": averages,
    "Optimizers that were made for few bits": few_bit_states,
    "What else importing a package and a step change": side_effects,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
