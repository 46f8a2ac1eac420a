"""What do optimizers, averages and sums that people really run do in few bits?

Every line runs the package itself on a CPU, in one thread, and gives a figure beside float32's. The
trainings are the smallest that show it: a tensor of 4,096 weights, mostly all equal, and gradients
that are given. So a figure says what the arithmetic does, and not how often a network meets it.

    python benchmarks/real_stacks.py benchmarks/results/real_stacks.md

It takes about five minutes, most of which torch.compile takes. The page docs/real_stacks.md says
what to do instead.
"""

import copy
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
from files import table_of
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from fp8rl.cli.throughput import origin

PACKAGES = (
    "torchao",
    "bitsandbytes",
    "torch-optimi",
    "heavyball",
    "schedulefree",
    "pytorch_optimizer",
    "ema-pytorch",
)
# What a package is called where it is imported
MODULES = {
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes",
    "torch-optimi": "optimi",
    "heavyball": "heavyball",
    "schedulefree": "schedulefree",
    "pytorch_optimizer": "pytorch_optimizer",
    "ema-pytorch": "ema_pytorch",
}
COLUMNS = "package", "what is run", "figure", "in few bits", "in float32"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPE = 64, 64  # the smallest tensor that 8-bit optimizers do not leave in float32

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Training(NamedTuple):
    """Gradients that are given, for one tensor of weights.

    `gradient` takes the number of the step and the weights in float32, and returns a number or a
    tensor of the shape of the weights.
    """

    gradient: Callable[[int, Tensor], Tensor | float]
    steps: int
    start: float = 1.0
    shape: tuple[int, ...] = SHAPE

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
        if hasattr(optimizer, "train"):  # Schedule-Free
            optimizer.train()
        take_step = step(optimizer) if step else optimizer.step
        schedule = scheduler(optimizer) if scheduler else None
        for t in range(self.steps):
            gradient = self.gradient(t, weights.detach().float())
            weights.grad = torch.as_tensor(gradient).expand(self.shape).to(dtype).clone()
            take_step()
            if schedule:
                schedule.step()
        return weights, optimizer


class Line(NamedTuple):
    """A row of a table."""

    package: str
    run: str
    figure: str
    few_bits: str
    float32: str


def constant(gradient: float) -> Callable[[int, Tensor], float]:
    """The same gradient at every step."""
    return lambda t, weights: gradient


def noise(mean: float = 0.0, scale: float = 1.0) -> Callable[[int, Tensor], Tensor]:
    """Gradients from N(mean, scale), the same in every run."""

    def gradient(t: int, weights: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(t)
        return mean + scale * torch.randn(weights.shape, generator=generator)

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
    return f"{x:.3g}"


def end(training: Training, make: MakeOptimizer, dtype: torch.dtype = FP32, **options) -> str:
    """The mean of the weights at the end, as text."""
    weights, _ = training.run(make, dtype, **options)
    return number(mean(weights))


def torch_optimizers() -> list[Line]:
    """torch's own optimizers on parameters of 16 bits, as after model.bfloat16()."""
    lines = []

    def add(run: str, figure: str, few_bits: str, float32: str) -> None:
        lines.append(Line("torch", run, figure, few_bits, float32))

    # v is the second moment. Its step, 0.001 of the distance, is less than half a place of bfloat16.
    peak = Training(falling(2_000), 2_000)
    later = Training(falling(2_000), 7_000)

    def v_left(dtype: torch.dtype) -> str:
        v = [mean(training.run(adam(lr=0.0), dtype)[1].state_dict()["state"][0]["exp_avg_sq"])
             for training in (peak, later)]
        return number(v[1] / v[0])

    add(
        "Adam, beta2 0.999, bf16, loop",
        "v, 5,000 steps after the gradient fell from 1 to 1e-3, of its peak",
        v_left(BF16),
        v_left(FP32),
    )
    for how in ("loop", "fused"):
        for steps in (5_000, 30_000):
            training = Training(noise(), steps)
            v = {}
            for dtype in (BF16, FP32):
                fused = how == "fused" and dtype == BF16
                weights, optimizer = training.run(adam(lr=0.0, fused=fused), dtype)
                v[dtype] = number(mean(optimizer.state[weights]["exp_avg_sq"]))
            add(
                f"Adam, beta2 0.999, bf16, {how}",
                f"v of gradients from N(0, 1), after {steps:,} steps",
                v[BF16],
                v[FP32],
            )

    # A step of 0.003 from 1.0 on, where numbers of bfloat16 are 0.0039 and 0.0078 apart
    falls = Training(constant(1.0), 1_000)
    figure = "weight 1.0 after 1,000 steps of 0.003"
    of_float32 = end(falls, adam(lr=3e-3))
    for how in ("loop", "foreach", "fused"):
        options = {} if how == "loop" else {how: True}
        add(f"Adam, bf16, {how}", figure, end(falls, adam(lr=3e-3, **options), BF16), of_float32)
    add(
        "Adam, bf16, compiled step", figure, end(falls, adam(lr=3e-3), BF16, step=compiled), of_float32
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
            end(falls, adam(lr=3e-3), BF16, step=compiled, scheduler=one_cycle(momentum)),
            end(falls, adam(lr=3e-3), scheduler=one_cycle(momentum)),
        )
    add(
        "NAdam, bf16",
        figure,
        end(falls, lambda parameters: torch.optim.NAdam(parameters, lr=3e-3), BF16),
        end(falls, lambda parameters: torch.optim.NAdam(parameters, lr=3e-3)),
    )
    add(
        "Muon, bf16",
        "weights 1.0 after 1,000 steps at the learning rate 0.003",
        end(falls, lambda parameters: torch.optim.Muon(parameters, lr=3e-3), BF16),
        end(falls, lambda parameters: torch.optim.Muon(parameters, lr=3e-3)),
    )

    # Weight decay
    decays = Training(constant(0.0), 1_000)
    for how in ("loop", "foreach", "fused"):
        options = {} if how == "loop" else {how: True}

        def adamw(parameters: list, options: dict = options) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1, **options)

        add(
            f"AdamW, bf16, {how}",
            "weight 1.0 after 1,000 steps of a decay of 0.002",
            end(decays, adamw, BF16),
            end(decays, adamw),
        )

    # Learning rates from tiny to absurd
    short = Training(noise(), 20)
    for dtype in (BF16, FP16):

        def moved(dtype: torch.dtype) -> str:
            shares = []
            for learning_rate in (1e-3, 1.0, 1e3):
                weights, _ = short.run(
                    lambda parameters, lr=learning_rate: torch.optim.SGD(
                        parameters, lr=lr, momentum=0.9, fused=True
                    ),
                    dtype,
                )
                shares.append(mean(weights != 1.0))
            return ", ".join(f"{share:.0%}" for share in shares)

        name = "bf16" if dtype == BF16 else "fp16"
        add(
            f"SGD, {name}, fused",
            "weights that move in 20 steps, at the learning rates 0.001, 1 and 1,000",
            moved(dtype),
            moved(FP32),
        )

    # Moments that overflow, underflow or cancel
    small = Training(constant(1e-3), 300)
    add(
        "Adam, fp16",
        "weight 1.0 after 300 steps of 0.003 with gradients of 1e-3",
        end(small, adam(lr=3e-3), FP16),
        end(small, adam(lr=3e-3)),
    )

    def adagrad(parameters: list) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=1e-2)

    sums = {}
    for dtype in (BF16, FP32):
        weights, optimizer = Training(constant(1.0), 10_000, 0.0).run(adagrad, dtype)
        sums[dtype] = f"{mean(optimizer.state[weights]['sum']):,.0f}"
    add("Adagrad, bf16", "sum of 10,000 squared gradients of 1", sums[BF16], sums[FP32])

    def centered(parameters: list) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr=1e-4, alpha=0.95, centered=True)

    nans = {}
    for dtype in (BF16, FP32):
        weights, _ = Training(noise(1.0, 0.1), 300).run(centered, dtype)
        nans[dtype] = f"{mean(weights.isnan()):.0%}"
    add(
        "RMSprop, centered, bf16",
        "weights that are NaN after 300 gradients from N(1, 0.1)",
        nans[BF16],
        nans[FP32],
    )

    for size in (1e-2, 1e-3, 1e-4):
        distances = {}
        for dtype in (BF16, FP32):
            training = Training(noise(0.0, size), 100, 0.1)
            weights, _ = training.run(
                lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2), dtype
            )
            distances[dtype] = number((weights.detach().float() - 0.1).norm().item())
        add(
            "Adafactor, bf16",
            f"distance after 100 steps with gradients from N(0, {size:g})",
            distances[BF16],
            distances[FP32],
        )
    return lines


def averages() -> list[Line]:
    """Running averages of a model in bfloat16, and sums of its gradients."""
    lines = []

    def add(package: str, run: str, figure: str, measure: Callable[[torch.dtype], float]) -> None:
        lines.append(Line(package, run, figure, number(measure(BF16)), number(measure(FP32))))

    def averaged(steps: int, **options) -> Callable[[torch.dtype], float]:
        """The average of a weight that jumps from 1 to 2."""

        def measure(dtype: torch.dtype) -> float:
            model = nn.Linear(4, 4, bias=False).to(dtype)
            model.weight.data.fill_(1.0)
            average = swa_utils.AveragedModel(model, **options)
            average.update_parameters(model)
            model.weight.data.fill_(2.0)
            for _ in range(steps):
                average.update_parameters(model)
            return mean(average.module.weight)

        return measure

    for decay, steps in ((0.999, 5_000), (0.99, 5_000)):
        for name in ("get_ema_avg_fn", "get_ema_multi_avg_fn"):
            function = getattr(swa_utils, name)(decay)
            option = {"multi_avg_fn" if "multi" in name else "avg_fn": function}
            add(
                "torch",
                f"AveragedModel of a bf16 model, {name}({decay})",
                f"average of a weight that jumped from 1 to 2, {steps:,} updates later",
                averaged(steps, **option),
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
    )
    add(
        "torch",
        "target network, bf16, target.lerp_(source, 0.005)",
        figure,
        target_network(lambda target, source: target.lerp_(source, 0.005)),
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
            batch = 2 + noise()(0, torch.empty(256, 8))
            for _ in range(3_000):
                layer(batch.to(dtype))
            return mean(layer.running_mean)

        return measure

    for momentum in (0.1, 0.01):
        add(
            "torch",
            f"BatchNorm1d of a bf16 model, momentum {momentum}",
            "running mean, of 2, after 3,000 batches",
            running_mean(momentum),
        )

    def schedule_free(learning_rate: float) -> Callable[[torch.dtype], float]:
        def measure(dtype: torch.dtype) -> float:
            import schedulefree

            weights, optimizer = Training(quadratic(1.0), 3_000).run(
                lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=learning_rate),
                dtype,
            )
            optimizer.eval()
            return mean(weights)

        return measure

    for learning_rate in (1e-3, 3e-3):
        add(
            "schedulefree",
            f"AdamWScheduleFree, bf16, learning rate {learning_rate:g}",
            "evaluation weight of w²/2 with noisy gradients, from 1.0, after 3,000 steps",
            schedule_free(learning_rate),
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

    for average in (1.0, 0.5, 0.1):
        add(
            "torch",
            f"gradients from N({average:g}, 1) of 4,096 micro-batches, added up in bf16",
            "share of the sum that is left",
            gradient_sum(average),
        )
    return lines


def few_bit_states() -> list[Line]:
    """Optimizers that were made for few bits."""
    import bitsandbytes
    import heavyball
    import optimi
    import torchao.optim

    lines = []

    def add(package: str, run: str, figure: str, few_bits: str, float32: str) -> None:
        lines.append(Line(package, run, figure, few_bits, float32))

    # Compensated sums and stochastic rounding
    tiny = Training(constant(1.0), 500)
    figure = "how far a weight of 1.0 moves in 500 steps of 1e-5"

    def moved(make: MakeOptimizer, dtype: torch.dtype = FP32) -> float:
        return mean(tiny.run(make, dtype)[0]) - 1.0

    of_float32 = number(moved(adam(lr=1e-5)))

    def kahan(parameters: list) -> torch.optim.Optimizer:
        return optimi.AdamW(parameters, lr=1e-5, weight_decay=0.0)

    add("torch-optimi", "AdamW, bf16, Kahan sum", figure, number(moved(kahan, BF16)), of_float32)
    weights, optimizer = tiny.run(kahan, BF16)
    compensation = optimizer.state[weights]["kahan_comp"]
    add(
        "torch-optimi",
        "AdamW, bf16, Kahan sum",
        "the same, with what the compensation holds",
        number(mean(weights) + mean(compensation) - 1.0),
        of_float32,
    )

    def stochastic(parameters: list) -> torch.optim.Optimizer:
        return torchao.optim._AdamW(
            parameters, lr=1e-5, weight_decay=0.0, bf16_stochastic_round=True
        )

    torch.manual_seed(0)
    add(
        "torchao",
        "_AdamW, bf16, stochastic rounding",
        figure,
        number(moved(stochastic, BF16)),
        of_float32,
    )
    torch.manual_seed(0)
    add(
        "heavyball",
        "AdamW, bf16 (rounds stochastically)",
        figure,
        number(moved(lambda parameters: heavyball.AdamW(parameters, lr=1e-5, weight_decay=0.0), BF16)),
        of_float32,
    )
    decays = Training(constant(0.0), 1_000)

    def decaying(parameters: list) -> torch.optim.Optimizer:
        return optimi.AdamW(parameters, lr=1e-3, weight_decay=0.1)

    add(
        "torch-optimi",
        "AdamW, bf16, Kahan sum",
        "weight 1.0 after 1,000 steps of a decay of 1e-4",
        end(decays, decaying, BF16),
        end(decays, decaying),
    )

    # One large gradient in a block
    def without_decay(kind: type, **options) -> MakeOptimizer:
        return lambda parameters: kind(parameters, lr=1e-3, weight_decay=0.0, **options)

    ao8 = without_decay(torchao.optim.AdamW8bit)
    ao8_small = without_decay(torchao.optim.AdamW8bit, block_size=64)
    ao_fp8 = without_decay(torchao.optim.AdamWFp8)
    ao4 = without_decay(torchao.optim.AdamW4bit)
    bnb8 = without_decay(bitsandbytes.optim.AdamW8bit)
    float32 = adam(lr=1e-3)
    small = one_large(0, torch.empty(SHAPE)) < 1

    def last_step(make: MakeOptimizer, gradient: Callable, steps: int) -> float:
        """The mean length of the last step of the small ones, in learning rates.

        The training is run twice, once a step longer: the optimizer's state is a program's own.
        """
        before, _ = Training(gradient, steps - 1, 0.0).run(make)
        after, _ = Training(gradient, steps, 0.0).run(make)
        return mean((after - before).detach().abs()[small]) / 1e-3

    for package, name, make in (
        ("torchao", "AdamW8bit", ao8),
        ("torchao", "AdamW8bit, block_size=64", ao8_small),
        ("torchao", "AdamWFp8", ao_fp8),
        ("torchao", "AdamW4bit", ao4),
        ("bitsandbytes", "AdamW8bit on a CPU", bnb8),
    ):
        run = f"{name}; of each 256 gradients one is 1, the others 1e-4"
        add(
            package,
            run,
            "200th step of the others, in learning rates",
            number(last_step(make, one_large, 200)),
            number(last_step(float32, one_large, 200)),
        )
        add(
            package,
            run,
            "the step after their gradients stopped, in learning rates",
            number(last_step(make, one_large_stops(200), 201)),
            number(last_step(float32, one_large_stops(200), 201)),
        )

    # The sign of the gradient
    for name, make in (("AdamW4bit", ao4), ("AdamW8bit", ao8)):
        for gradient in (1.0, -1.0):
            training = Training(constant(gradient), 200, 0.0)
            add(
                "torchao",
                f"{name}, constant gradient {gradient:+g}",
                "weight 0 after 200 steps of 0.001",
                end(training, make),
                end(training, float32),
            )

    def lion(parameters: list) -> torch.optim.Optimizer:
        return bitsandbytes.optim.Lion8bit(parameters, lr=1e-3, weight_decay=0.0)

    add(
        "bitsandbytes",
        "Lion8bit on a CPU, gradient 0",
        "weight 0 after 200 steps of 0.001",
        end(Training(constant(0.0), 200, 0.0), lion),
        "0",
    )

    # Which tensors have eight bits?
    sizes = 4_095, 4_096, 4_100, 4_352

    def with_eight_bits(make: MakeOptimizer, state: str) -> str:
        names = []
        for size in sizes:
            weights, optimizer = Training(constant(1.0), 1, shape=(size,)).run(make)
            moment = optimizer.state[weights][state]
            if moment.dtype == torch.uint8 or hasattr(moment, "codes"):
                names.append(f"{size:,}")
        return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]

    figure = "tensors with 8 bits, of those with 4,095, 4,096, 4,100 and 4,352 numbers"
    add("torchao", "AdamW8bit", figure, with_eight_bits(ao8, "exp_avg"), "-")
    add("bitsandbytes", "AdamW8bit on a CPU", figure, with_eight_bits(bnb8, "state1"), "-")

    # Small tensors of a bf16 model: their moments have its type.
    weights, optimizer = Training(falling(2_000), 7_000, shape=(64,)).run(ao8, BF16)
    v_of_small = optimizer.state[weights]["exp_avg_sq"]
    weights, optimizer = Training(falling(2_000), 7_000, shape=(64,)).run(float32)
    add(
        "torchao",
        "AdamW8bit on a bf16 tensor of 64 numbers",
        "v, 5,000 steps after the gradient fell from 1 to 1e-3",
        number(mean(v_of_small)),
        number(mean(optimizer.state[weights]["exp_avg_sq"])),
    )

    # Steps are counted in the default type.
    counts = {}
    lengths = {}
    drift = noise(1.0, 1.0)
    for dtype in (BF16, FP32):
        torch.set_default_dtype(dtype)
        try:
            weights, optimizer = Training(lambda t, w: drift(t, w.float()), 1_500, 0.0).run(ao8)
        finally:
            torch.set_default_dtype(FP32)
        counts[dtype] = f"{optimizer.state[weights]['step'].item():,.0f}"
        lengths[dtype] = mean(weights)
    add(
        "torchao",
        "AdamW8bit on float32 weights, set_default_dtype(bfloat16)",
        "steps that it counted, of 1,500",
        counts[BF16],
        counts[FP32],
    )
    add(
        "torchao",
        "AdamW8bit on float32 weights, set_default_dtype(bfloat16)",
        "weight 0 after 1,500 gradients from N(1, 1) at 0.001",
        number(lengths[BF16]),
        number(lengths[FP32]),
    )

    # Compilations
    graphs = []
    for momentum in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        Training(constant(1.0), 4).run(
            ao8,
            scheduler=lambda optimizer, momentum=momentum: lr_scheduler.OneCycleLR(
                optimizer, 3e-3, total_steps=100, cycle_momentum=momentum
            ),
        )
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    add(
        "torchao",
        "AdamW8bit, OneCycleLR that cycles momentum, too",
        "compilations in 4 steps (with the learning rate alone at the right)",
        f"{graphs[0]}",
        f"{graphs[1]}",
    )
    return lines


def settings() -> dict[str, object]:
    """What a program has set for all of torch, numpy and Python."""
    import os
    import random

    import numpy
    import torch._dynamo.config
    import torch._inductor.config
    from torch.optim import optimizer

    found = {
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "torch's generator": torch.get_rng_state().sum().item(),
        "numpy's generator": numpy.random.get_state()[1].sum(),
        "Python's generator": hash(random.getstate()),
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
        values = {key: repr(value) for key, value in config.get_config_copy().items()
                  if not isinstance(value, set)}
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


def side_effects() -> str:
    """What importing a package and a step change beside weights and state."""
    import bitsandbytes
    import heavyball
    import optimi
    import pytorch_optimizer
    import schedulefree
    import torchao.optim

    optimizers = {
        "torchao": ("AdamW8bit, stochastic rounding", lambda parameters: torchao.optim.AdamW8bit(
            parameters, bf16_stochastic_round=True)),
        "bitsandbytes": ("AdamW8bit", bitsandbytes.optim.AdamW8bit),
        "torch-optimi": ("AdamW", lambda parameters: optimi.AdamW(parameters, lr=1e-3)),
        "heavyball": ("AdamW", lambda parameters: heavyball.AdamW(parameters, lr=1e-3)),
        "schedulefree": ("AdamWScheduleFree", schedulefree.AdamWScheduleFree),
        "pytorch_optimizer": ("StableAdamW", pytorch_optimizer.StableAdamW),
    }
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for package, (name, make) in optimizers.items():
            by_import = pool.apply(changed_by_import, (MODULES[package],))
            by_steps = [changed_by_step(make, dtype) for dtype in (FP32, BF16)]
            rows.append([package, by_import, name, *by_steps])
    columns = "package", "importing it changes", "optimizer", "a step on float32", "a step on bf16"
    return table_of(columns, rows)


def table(lines: list[Line]) -> str:
    return table_of(COLUMNS, lines)


def main(out: Path) -> None:
    missing = [name for name in MODULES if not importlib.util.find_spec(MODULES[name].split(".")[0])]
    if missing:
        remedy = "pip install --no-deps -r benchmarks/requirements.txt"
        sys.exit(f"real_stacks needs {' and '.join(missing)}: {remedy}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # torch.compile says that it compiles too often
    torch.set_num_threads(1)
    parts = []
    for heading, lines in (
        ("torch's optimizers on parameters of 16 bits, as after `model.bfloat16()`:", torch_optimizers),
        ("Averages and sums in bfloat16:", averages),
        ("Optimizers that were made for few bits:", few_bit_states),
    ):
        parts += [heading, table(lines())]
    parts += ["What else importing a package and a step change:", side_effects()]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    parts.append(f"`python benchmarks/real_stacks.py {out}` on {origin()}; {versions}.")
    out.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
