"""Real optimizers that are watched beside a script's optimizer, each on its own copy.

The script trains in float32 and is not changed. After each of its steps, every copy makes a step
with the same gradients (optimizer_copy.py). Over windows of updates, how far a copy's weights move
is compared with how far the script's move, on a sample of each tensor's numbers. That gives a rate,
as for every place (doctor.py). A rate does not see numbers that float32 leaves alone. So it is also
measured on the sample which share of the numbers a copy moves although the script does not: they
drift. These are measured on whole tensors:

    longest step   the farthest that a number moved in one update, in learning rates; of parameters
                   in 16 bits, what rounding alone may move them is taken off
    bytes          what is kept of a parameter between updates
    weight decay   which share of it arrives, on a tensor of its own whose gradients are 0

A copy needs the memory of its parameters and its state. All copies together need one more copy of
the script's float32 parameters.
"""

import math
import weakref
from collections.abc import Callable

import numpy as np
import torch

from .findings import DRIFTING, NOT_JUDGED, SAME, Finding
from .optimizer_copy import OptimizerCopy, RandomNumbers, bytes_of, state_checksums
from .real_optimizers import RealOptimizer
from .run_script import first_line
from .sample import NumberSums, Sample, WindowSums
from .verdicts import SEVERITY, judge

LEAP = 10  # a step that is longer than so many of the script's longest ones is a leap
# A number drifts in a window if float32 leaves it alone, and a copy moves it by more than this
# share of how far float32 moves the numbers of its tensor (root mean square) in the window with the
# longest way so far. A shorter way may be the rounding of a difference, or the end of a momentum,
# which float32 has rounded away a bit earlier. In trainings with dead units and rarely used rows,
# no number of nine Adams of torch, torchao, optimi, heavyball and bitsandbytes drifted, and 6 to
# 22% of those of bitsandbytes' Lion8bit did.
DRIFT = 0.1
# How long weight decay is followed: until it has taken this share, but within these updates
DECAY_SHARE = 0.1
DECAY_STEPS = 64, 256
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}


class WatchedCopy:
    """A copy that is watched, and what was measured of it.

    `windows`   measurements of each window, and `numbers` of each number that is followed
    `drifted`   the share of the numbers that drift in each window
    `longest`   the longest step of each of the T tensors, in learning rates
    `reason`    why it is not judged; empty if it is
    `diverged`  the update at which its weights were no longer finite; 0 if they are
    """

    def __init__(self, entry: RealOptimizer, tensors: int):
        self.entry = entry
        self.copy: OptimizerCopy | None = None
        self.windows: list[WindowSums] = []
        self.numbers = NumberSums()
        self.drifted: list[float] = []
        self.longest = torch.zeros(tensors)
        self.reason = ""
        self.diverged = 0
        self.start: np.ndarray | None = None  # sampled weights at the beginning of the window
        self.displaced: np.ndarray | None = None  # how far other code has moved them since then
        self.bytes: list[float] = []  # what is kept of each tensor; empty before the first step
        self.lacks_state = False  # whether it began without a state that the script had
        self.left_out: list[str] = []  # options that are not the script's, in words
        self.in_float32: list[bool] = []  # whether a tensor is kept wholly in float32


class WatchedCopies:
    """The copies of one optimizer of a script.

    `name`          name of the optimizer in reports
    `optimizer`     the script's optimizer
    `parameters`    its T parameters that are measured, float32
    `tensor_names`  their names
    `entries`       which real optimizers
    `length`        updates in a window
    `sample`        which numbers of each tensor are measured

    Optimizer and parameters are held by weak references.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.Tensor],
        tensor_names: list[str],
        entries: list[RealOptimizer],
        length: int,
        sample: Sample,
    ):
        self.name = name
        self.reference = weakref.ref(optimizer)
        self.references = [weakref.ref(p) for p in parameters]
        self.keys = [id(p) for p in parameters]
        self.tensor_names = tensor_names
        self.length = length
        self.sample = sample
        self.copies = [WatchedCopy(entry, len(parameters)) for entry in entries]
        self.random_numbers = RandomNumbers(parameters[0].device)
        self.longest = torch.zeros(len(parameters))  # the script's own longest steps
        self.longest_ways = np.zeros(len(parameters))  # the script's, in a window (`DRIFT`)
        self.group = groups_of(optimizer, self.keys)
        self.decaying_group = 0  # the number of the group with the most weight decay
        self.updates = 0
        self.learning_rates = 0.0  # their sum over the updates, in the decaying group
        self.last: list[torch.Tensor] | None = None  # the script's weights after its last step
        self.checksums: list[int] = []  # of the state of the script's optimizer after that

    def install(self, optimizer: torch.optim.Optimizer) -> list:
        """Registers the hooks with the script's optimizer. Returns their handles."""
        return [
            optimizer.register_step_pre_hook(torch.compiler.disable(self.before_step)),
            optimizer.register_step_post_hook(torch.compiler.disable(self.after_step)),
        ]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The script's parameters; none once it has dropped one of them."""
        parameters = [reference() for reference in self.references]
        return [] if any(p is None for p in parameters) else parameters

    @property
    def active(self) -> list[WatchedCopy]:
        """The copies that still make steps."""
        return [watched for watched in self.copies if watched.copy is not None]

    @torch.no_grad()
    def before_step(self, optimizer, args=(), kwargs=None) -> None:
        """Makes the copies at the first step. Later it moves them as other code has moved the
        script's weights since the last step."""
        parameters = self.parameters
        if not parameters:
            return
        if self.last is None:
            self.begin(optimizer, parameters)
            self.checksums = state_checksums(optimizer)
            return
        if state_checksums(optimizer) != self.checksums:
            with self.random_numbers.in_use():
                for watched in self.active:
                    self.attempt(watched, watched.copy.take_state, optimizer)
        changes = torch._foreach_sub(parameters, self.last)
        # A NaN is a change, too
        sizes = torch.stack(torch._foreach_norm(changes, torch.inf)).tolist()
        for t, size in enumerate(sizes):
            if size != 0:
                self.displace(t, parameters[t], changes[t])

    def displace(self, t: int, p: torch.Tensor, by: torch.Tensor) -> None:
        """Moves the copies of a parameter as other code has moved the script's since its step."""
        self.last[t].copy_(p)
        self.displaced[t] += self.sample.read_one(t, by).cpu().numpy()
        for watched in self.active:
            copy = watched.copy.parameters[self.keys[t]]
            before = self.sample.read_one(t, copy).float()
            copy.add_(by.to(copy.dtype))
            moved = self.sample.read_one(t, copy).float() - before
            watched.displaced[t] += moved.cpu().numpy()

    def begin(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        """Makes the copies, and begins a window."""
        self.last = [p.detach().clone() for p in parameters]
        with self.random_numbers.in_use():
            for watched in self.copies:
                if watched.reason:
                    continue
                try:
                    watched.copy = OptimizerCopy(watched.entry, optimizer)
                except Exception as error:
                    watched.reason = self.failure(watched, error, "could not be made")
        decays = [
            (group.get("weight_decay") or 0) * float(group["lr"])
            for group in optimizer.param_groups
        ]
        self.decaying_group = int(np.argmax(decays))
        self.begin_window(optimizer, parameters)

    def failure(self, watched: WatchedCopy, error: Exception, what: str) -> str:
        """Why a copy is not judged, in one line."""
        if isinstance(error, ValueError) and str(error).startswith(watched.entry.text):
            return first_line(error).removeprefix(f"{watched.entry.text}: ")
        return f"it {what} ({type(error).__name__}: {first_line(error)})"

    def begin_window(self, optimizer, parameters: list[torch.Tensor]) -> None:
        self.count = 0
        self.start = self.weights_of(optimizer, parameters)
        self.displaced = np.zeros_like(self.start)
        for watched in self.active:
            watched.start = self.weights_of(watched.copy.optimizer, self.of_copy(watched))
            watched.displaced = np.zeros_like(self.start)

    def of_copy(self, watched: WatchedCopy) -> list[torch.Tensor]:
        """A copy's parameters, in the order of the script's."""
        return [watched.copy.parameters[key] for key in self.keys]

    def weights_of(self, optimizer, parameters: list[torch.Tensor]) -> np.ndarray:
        """The sampled weights [T, P] with which an optimizer would be evaluated.

        They are the parameters, but for two kinds of optimizers. Schedule-Free evaluates x. In
        training its parameters are y = (1 - beta1) z + beta1 x (Defazio et al. 2024, "The Road Less
        Scheduled"). A Kahan sum keeps what rounding has left out of a parameter beside it, and adds
        it as soon as it is large enough. So a weight is the sum of both.
        """
        states = [optimizer.state.get(p, {}) for p in parameters]
        y = self.sample.take(parameters)
        if any("kahan_comp" in state for state in states):
            pairs = zip(parameters, states, strict=True)
            y += self.sample.take([compensation(p, state) for p, state in pairs])
        if not optimizer.param_groups[0].get("train_mode"):
            return y
        z = self.sample.take([s.get("z", p) for s, p in zip(states, parameters, strict=True)])
        beta1 = float(optimizer.param_groups[0]["betas"][0])
        return y + (1 - 1 / beta1) * (z - y)

    @torch.no_grad()
    def after_step(self, optimizer, args=(), kwargs=None) -> None:
        """Lets every copy make the step that the script has made, and measures them."""
        parameters = self.parameters
        # A GradScaler tells a fused optimizer in this way to skip the step.
        if not parameters or self.last is None or getattr(optimizer, "found_inf", None):
            return
        self.updates += 1
        self.count += 1
        if self.updates == 1:
            kept = [[p, dict(optimizer.state.get(p, {}))] for p in parameters]
            self.own_bytes = bytes_of(kept) / float(np.sum(self.sample.sizes))
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.learning_rates += rates[self.decaying_group]
        lr = torch.tensor([rates[g] for g in self.group])
        self.longest = torch.maximum(self.longest, longest_steps(self.last, parameters, lr))
        with self.random_numbers.in_use():
            for watched in self.active:
                watched.lacks_state |= watched.copy.lacks_state
                self.step(watched, optimizer, lr)
        torch._foreach_copy_(self.last, parameters)
        self.checksums = state_checksums(optimizer)
        if self.count == self.length:
            self.end_window(optimizer, parameters)

    def step(self, watched: WatchedCopy, optimizer, lr: torch.Tensor) -> None:
        """Lets one copy make a step. A copy that fails makes no more."""
        parameters = self.of_copy(watched)
        before = [p.detach().clone() for p in parameters]
        self.attempt(watched, watched.copy.step, optimizer)
        if watched.copy is None:
            return
        longest = longest_steps(before, parameters, lr, watched.longest)
        watched.longest = torch.maximum(watched.longest, longest)
        if not longest.isfinite().all():
            watched.diverged = self.updates
            self.note_sizes(watched)
            watched.copy = None
        elif self.updates == 1:
            self.note_sizes(watched)

    def attempt(self, watched: WatchedCopy, function: Callable, optimizer) -> None:
        """Calls a method of a copy. A copy that fails makes no more steps."""
        try:
            function(optimizer)
        except Exception as error:
            watched.copy = None
            watched.reason = self.failure(watched, error, f"failed in step {self.updates}")

    def note_sizes(self, watched: WatchedCopy) -> None:
        """Notes what a copy keeps of each tensor, and its own options."""
        watched.left_out = watched.copy.left_out
        watched.bytes = [watched.copy.bytes_of(key) for key in self.keys]
        watched.in_float32 = [watched.copy.is_in_float32(key) for key in self.keys]

    def end_window(self, optimizer, parameters: list[torch.Tensor]) -> None:
        true = self.weights_of(optimizer, parameters) - self.start - self.displaced
        ways = np.sqrt((np.square(true) * self.sample.emphasis).mean(1))  # [T]
        self.longest_ways = np.maximum(self.longest_ways, ways)
        for watched in self.active:
            weights = self.weights_of(watched.copy.optimizer, self.of_copy(watched))
            moved = weights - watched.start - watched.displaced
            lost = (moved == 0) & (true != 0)
            sums = WindowSums.of(moved[None], true, lost[None], self.sample.emphasis)
            watched.windows.append(sums.of_row(0))
            watched.numbers.add(moved[None], true)
            watched.drifted.append(share_drifted(moved, true, self.longest_ways, self.sample))
        self.begin_window(optimizer, parameters)

    def findings(self, tolerates: tuple[float, float]) -> list[Finding]:
        """The finding of each copy, in the order of the entries, without cures."""
        return [self.finding_of(watched, tolerates) for watched in self.copies]

    def finding_of(self, watched: WatchedCopy, tolerates: tuple[float, float]) -> Finding:
        text = watched.entry.text
        if watched.reason:
            return Finding.without_rates(self.name, text, NOT_JUDGED, watched.reason)
        finding = judge(
            self.name,
            text,
            watched.windows,
            self.sample,
            self.tensor_names,
            tolerates,
            self.length,
            numbers=watched.numbers.of_row(0) if watched.windows else None,
        )
        if watched.diverged:
            why = f"its weights became infinite or NaN at update {watched.diverged}"
            finding = finding._replace(verdict="diverges", why=why)
        if not watched.bytes:
            return finding
        numbers = np.asarray(self.sample.sizes)
        longest = float(watched.longest.max())
        own = float(self.longest.max())
        drifted = float(np.mean(watched.drifted)) if watched.drifted else math.nan
        decay_rate = self.decay_rate(watched)
        bytes_per_parameter = sum(watched.bytes) / float(numbers.sum())
        low, high = tolerates
        verdict = finding.verdict
        reasons = [finding.why]
        if drifted > DRIFTING:
            verdict = worse(verdict, "drifts")
        if longest > LEAP * own > 0:
            verdict = worse(verdict, "leaps")
            farthest = self.tensor_names[int(watched.longest.argmax())]
            reasons.insert(0, f"the longest step is in {farthest}")
        if decay_rate < low or decay_rate > high:
            verdict = worse(verdict, "frozen tensors" if decay_rate < low else "faster")
            reasons.insert(0, f"{decay_rate:.2f} of the weight decay arrives")
        is_same = finding.rate == 1 and finding.noise == 0 and longest == own
        if is_same and bytes_per_parameter == self.own_bytes:
            reasons = [f"{SAME}: its steps are equal, bit for bit"]
        if watched.lacks_state:
            reasons.append("it began without the state that the script had, which it cannot read")
        return finding._replace(
            verdict=verdict,
            why="; ".join([*reasons, *watched.left_out]),
            longest_step=longest,
            longest_step_float32=own,
            drifted=drifted,
            bytes_per_parameter=bytes_per_parameter,
            left_in_float32=tuple(
                name
                for name, left in zip(self.tensor_names, watched.in_float32, strict=True)
                if left
            ),
            decay_rate=decay_rate,
            tensor_longest_steps=by_name(self.tensor_names, watched.longest.tolist()),
            tensor_bytes=by_name(self.tensor_names, (np.asarray(watched.bytes) / numbers).tolist()),
        )

    def decay_rate(self, watched: WatchedCopy) -> float:
        """Which share of the weight decay arrives; NaN without weight decay.

        The script's class in float32 and the real optimizer both train a tensor of 64 x 64 numbers
        with gradients of 0, at the training's mean learning rate. Weight decay is all that moves
        it. The share is <d', d> / <d, d>, as for every rate.
        """
        optimizer = self.reference()
        if optimizer is None or self.updates == 0:
            return math.nan
        group = optimizer.param_groups[self.decaying_group]
        lr = self.learning_rates / self.updates
        per_update = lr * float(group.get("weight_decay") or 0)
        if per_update == 0:
            return math.nan
        least, most = DECAY_STEPS
        steps = int(min(max(DECAY_SHARE / per_update, least), most))
        generator = torch.Generator(device="cpu").manual_seed(0)
        weights = torch.randn(64, 64, generator=generator, dtype=torch.float32, device="cpu")
        own = RealOptimizer("model=fp32", "", {}, "", {}, False)
        try:
            with self.random_numbers.in_use():
                start = torch.nn.Parameter(weights.to(self.random_numbers.device))
                scheduled = with_one_parameter(optimizer, group, start, lr)
                copies = [OptimizerCopy(entry, scheduled) for entry in (own, watched.entry)]
                # Copies, because the parameters change in place
                before = [copy.parameters[id(start)].detach().float().clone() for copy in copies]
                start.grad = torch.zeros_like(start)
                for _ in range(steps):
                    for copy in copies:
                        copy.step(scheduled)
                after = [copy.parameters[id(start)].detach().float() for copy in copies]
        except Exception:  # the decay is a note; the rate stands without it
            return math.nan
        true, moved = (b - a for a, b in zip(before, after, strict=True))
        return float((moved * true).sum() / true.square().sum())


def with_one_parameter(optimizer, group: dict, parameter, lr: float) -> torch.optim.Optimizer:
    """An object with the class and the settings of an optimizer, and one parameter. It makes no
    step."""
    alone = object.__new__(type(optimizer))
    vars(alone).update(vars(optimizer))
    alone.param_groups = [{**group, "params": [parameter], "lr": lr}]
    alone.state = {}
    return alone


def compensation(parameter: torch.Tensor, state: dict) -> torch.Tensor:
    """What a Kahan sum keeps of a parameter beside it, in the parameter's shape. It is 0 if nothing
    is kept, for which optimi has a single number or None."""
    kept = state.get("kahan_comp")
    if kept is None or kept.shape != parameter.shape or not kept.is_floating_point():
        return torch.zeros_like(parameter)
    return kept


def share_drifted(
    moved: np.ndarray, true: np.ndarray, longest_ways: np.ndarray, sample: Sample
) -> float:
    """The share of all numbers that a copy moves although float32 does not (`DRIFT`).

    `moved` and `true` [T, P] are how far the sampled numbers of the copy and of the script move.
    """
    drifting = (true == 0) & (np.abs(moved) > DRIFT * longest_ways[:, None])
    of_tensors = (drifting * sample.emphasis).mean(1)  # [T]
    return float(np.average(of_tensors, weights=sample.sizes))


def worse(verdict: str, word: str) -> str:
    """The worse of a verdict and a word. What is not judged stays so."""
    if verdict == NOT_JUDGED:
        return verdict
    return max(verdict, word, key=SEVERITY.index)


def by_name(names: list[str], values: list[float]) -> dict[str, float]:
    return dict(zip(names, values, strict=True))


def groups_of(optimizer: torch.optim.Optimizer, keys: list[int]) -> list[int]:
    """The number of the parameter group of each parameter, by identity."""
    number = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [number[key] for key in keys]


def longest_steps(
    before: list[torch.Tensor],
    after: list[torch.Tensor],
    lr: torch.Tensor,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """The farthest that a number of each tensor has moved, in learning rates, float32 [T].

    In 16 bits, a number moves by whole spacings, however short the step. So one spacing is taken
    off. That is computed only where the result may be longer than `known`.
    """
    moved = torch._foreach_sub(after, before)
    distance = torch.stack(torch._foreach_norm(moved, math.inf)).float().cpu()
    longest = torch.where(lr > 0, distance / lr, 0)
    mantissa = MANTISSA.get(after[0].dtype)
    if mantissa is None:
        return longest
    for t in torch.nonzero(longest > known).flatten().tolist():
        farther = torch.maximum(before[t].abs(), after[t].abs()).float()
        _, exponent = torch.frexp(farther)  # farther = fraction 2^exponent, fraction below 1
        spacing = torch.exp2((exponent - 1 - mantissa).float())
        distance = (after[t].float() - before[t].float()).abs() - spacing
        longest[t] = distance.max().clamp(min=0).cpu() / lr[t]
    return longest
