"""A rollout as one kernel: S agents act in their environments for T steps, in Triton.

If the operations of a step are launched one by one, each takes microseconds, for a few kilobytes
that go to memory and back. Here, a program of the kernel has one agent and some of its
environments. It keeps their states on the chip and loops over time: the network's layers, the
action, the physics, the reset.

The physics of a task is not written a second time. `written` traces the task's own `advance` and
`observe` with torch.fx, for one environment, and translates each arithmetic operation (FORMS).
Operations that only move numbers (MOVES: stack, unbind, slices) need no translation. They are
carried out during the translation, on tensors that hold the names of the numbers.

Random numbers are drawn beforehand, as for the plain loop, rollout.unroll. The results are the same
as in the plain loop, but for rounding. If the environment variable TRITON_INTERPRET is 1, Triton's
interpreter runs the kernel on a CPU, slowly."""

import copy
import functools
import hashlib
import itertools
import linecache
import math
import warnings
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from ... import fp8
from ...distribution import Gaussian
from ...env import TensorEnv
from ...rollout import unroll
from ..matmul_rounding import TO
from .triton_quantize import scale_of

WIDTHS = 16, 32, 64, 128  # units in a layer
# The most numbers in the results of a layer that a program may have in e4m3, in which a program has
# all environments of an agent. (With 128 units and 64 environments, an H200 took longer than in the
# plain loop. With 64 units, more environments were not tried.)
MOST_RESULTS = 64 * 64
# The most numbers in the layers between the first layer and the heads, which are in shared memory.
MOST_WEIGHTS = 2 * 128 * 128
BF16, FP16, E4M3 = (tl.constexpr(i) for i in (1, 2, 3))  # types that `cast` rounds to; 0 is float32
# The rounding functions that `cast` computes, by these numbers.
ROUNDINGS = (
    None,
    TO[torch.bfloat16],
    TO[torch.float16],
    TO[fp8.E4M3],
)
SIDE = tl.constexpr(16)  # columns of other matrices; tl.dot multiplies no fewer
COLUMN = f"tl.arange(0, {SIDE.value})[None, :]"

# Operations of torch and their forms in Triton: of numbers (FORMS), comparisons of numbers
# (COMPARISONS), and operations on truth values (LOGICAL).
aten, NAN = torch.ops.aten, "propagate_nan=tl.PropagateNan.ALL"
FORMS = {
    aten.add: "{} + {}",
    aten.sub: "{} - {}",
    aten.mul: "{} * {}",
    aten.div: "{} / {}",
    aten.neg: "-{}",
}
FORMS |= {
    getattr(aten, name): f"tl.{name}({{}})" for name in ("sin", "cos", "exp", "log", "sqrt", "abs")
}
FORMS |= {getattr(aten, name): f"tl.{name}({{}}, {{}}, {NAN})" for name in ("minimum", "maximum")}
FORMS[aten.clamp] = f"tl.minimum(tl.maximum({{}}, {{}}, {NAN}), {{}}, {NAN})"
FORMS[aten.remainder] = "{0} - tl.floor({0} / {1}) * {1}"
COMPARISONS = {
    aten.gt: "{} > {}",
    aten.lt: "{} < {}",
    aten.ge: "{} >= {}",
    aten.le: "{} <= {}",
    aten.eq: "{} == {}",
}
LOGICAL = {
    aten.bitwise_or: "{} | {}",
    aten.logical_or: "{} | {}",
    aten.bitwise_and: "{} & {}",
    aten.logical_and: "{} & {}",
}
LOGICAL |= {aten.logical_not: "{} == 0", aten.bitwise_not: "{} == 0"}
MOVES = {
    aten.slice,
    aten.select,
    aten.squeeze,
    aten.unsqueeze,
    aten.cat,
    aten.view,
    aten.permute,
    aten.expand,
    aten.clone,
}


class Writer(fx.Interpreter):
    """Runs a traced function on names, and writes down its computations as lines x0 = ..., x1 = ...

    Names of numbers are int64 tensors. Raises NotImplementedError for an operation that has no
    form.
    """

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.lines = []
        self.logical = set()
        self.extra_traceback = False

    def new(self, expression: str, logical: bool = False) -> int:
        """Writes a line, and returns the name of its number or truth value."""
        self.lines.append(f"x{len(self.lines)} = {expression}")
        self.logical |= {len(self.lines) - 1} if logical else set()
        return len(self.lines) - 1

    def get_attr(self, target, args, kwargs):
        constants = super().get_attr(target, args, kwargs)
        found = [self.new(literal(x), isinstance(x, bool)) for x in constants.flatten().tolist()]
        return torch.tensor(found).view(constants.shape)

    def is_logical(self, x) -> bool:
        return isinstance(x, bool) or (
            isinstance(x, torch.Tensor) and not {*x.flatten().tolist()} - self.logical
        )

    def call_function(self, target, args, kwargs):
        op, alpha = target.overloadpacket, kwargs.get("alpha", 1)
        if op in MOVES:
            return target(*args, **kwargs)
        if op is aten.clamp:
            args = [
                bound if x is None else x
                for x, bound in zip((*args, None)[:3], (None, -math.inf, math.inf), strict=True)
            ]
        logical = [self.is_logical(x) for x in args]
        if op is aten.full_like:
            true = kwargs.get("dtype") is torch.bool
            return self.each(
                f"tl.full(x0.shape, {literal(args[1])}, {'tl.int1' if true else 'tl.float32'})",
                args[:1],
                true,
            )
        if op is aten._to_copy and kwargs["dtype"] is torch.float32:
            return self.each("{}.to(tl.float32)", args[:1])
        if op is aten.where and logical[0] and logical[1] == logical[2]:
            return self.each("tl.where({}, {}, {})", args, logical[1])
        if op in LOGICAL and all(logical):
            return self.each(LOGICAL[op], args, True)
        if op is aten.pow and not isinstance(args[1], torch.Tensor) and args[1] == 2:
            op, args = aten.mul, (args[0], args[0])
        if op not in FORMS | COMPARISONS or all(logical) or kwargs.keys() - {"alpha"}:
            raise NotImplementedError(f"{target} has no form for Triton")
        args = [
            self.each("{}.to(tl.float32)", [x]) if true else x
            for x, true in zip(args, logical, strict=True)
        ]
        if alpha != 1:
            args = args[0], self.each(f"{{}} * {literal(alpha)}", args[1:])
        return self.each((FORMS | COMPARISONS)[op], args, op in COMPARISONS)

    def each(self, form: str, args: list, logical: bool = False) -> torch.Tensor:
        """A new name for each element of the arguments, tensors of names or numbers."""
        names = torch.broadcast_tensors(*(x for x in args if isinstance(x, torch.Tensor)))
        found = []
        for row in zip(*(x.flatten().tolist() for x in names), strict=True):
            own = iter(row)
            words = [f"x{next(own)}" if isinstance(x, torch.Tensor) else literal(x) for x in args]
            found.append(self.new(form.format(*words), logical))
        return torch.tensor(found).view(names[0].shape)


def literal(number: float) -> str:
    """A number as Triton reads it."""
    return (
        f'float("{number}")' if isinstance(number, float) and math.isinf(number) else repr(number)
    )


def written(env: TensorEnv, name: str, inputs: dict[str, torch.Tensor]) -> Callable:
    """Translates a method of an environment, a function of tensors like `inputs`, to Triton.

    For tensors [1, columns], the Triton function takes and returns matrices [B, 16] with 0 in the
    other columns. For tensors [1], it takes and returns vectors [B], with whole numbers as float32.
    Raises NotImplementedError if the method cannot be translated, or if it depends on attributes
    that may change.
    """
    try:
        # A copy, because tracing may change it. It has no attributes that change from step to step.
        twin = copy.deepcopy(env)
        vars(twin).update(dict.fromkeys(env.NAMES))
        before = dict(vars(twin))
        method, decompositions = getattr(twin, name), core_aten_decompositions()
        writer, names = Writer(make_fx(lambda *x: method(*x), decompositions)(*inputs.values())), []
        for own, x in inputs.items():
            columns = range(x.shape[1]) if x.dim() > 1 else ()
            found = [
                writer.new(f"tl.sum(tl.where({COLUMN} == {i}, {own}, 0.0), 1)") for i in columns
            ]
            names.append(torch.tensor(found or [writer.new(own)]).view(x.shape))
        results = writer.run(*names)
        results = [results] if isinstance(results, torch.Tensor) else results
        same = vars(twin).keys() == before.keys() and all(
            x is before[name] for name, x in vars(twin).items()
        )
        if not same or any(len(x) != 1 for x in results):
            raise NotImplementedError("it depends on what is no part of the state")
        returned = ", ".join(map(joined, results))
    except Exception as error:  # whatever a task's own code raises when it is traced
        raise NotImplementedError(f"{name} cannot be translated: {error}") from error
    text = (
        "\n    ".join([f"def {name}({', '.join(inputs)}):", *writer.lines, f"return {returned}"])
        + "\n"
    )
    file, scope = f"<{name} {hashlib.sha256(text.encode()).hexdigest()}>", {"tl": tl}
    # Where Triton looks for the source
    linecache.cache[file] = (
        len(text),
        None,
        text.splitlines(True),
        file,
    )
    exec(compile(text, file, "exec"), scope)
    return triton.jit(scope[name])


def joined(names: torch.Tensor) -> str:
    """A vector [1] of names, or a matrix [1, columns], as Triton's."""
    if names.dim() == 1:
        return f"x{names.item()}"
    text = "0.0"
    for i, name in enumerate(names[0].tolist()):
        text = f"tl.where({COLUMN} == {i}, x{name}[:, None], {text})"
    return text


@triton.jit
def cast(x, inside, TO: tl.constexpr):
    """Rounds a matrix, to e4m3 with a scale as in fp8.quantize: of the rows `inside`."""
    if TO == BF16:
        x = x.to(tl.bfloat16).to(tl.float32)
    if TO == FP16:
        x = x.to(tl.float16).to(tl.float32)
    if TO == E4M3:
        # Larger magnitudes have larger bits, and NaN has the largest.
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bits = tl.max(tl.max(tl.where(inside[:, None], magnitude, 0), 1), 0)
        scale = ((scale_of(bits, 3) + 127) << 23).to(tl.float32, bitcast=True)
        binade = (magnitude & 0x7F800000).to(tl.float32, bitcast=True)
        # 2^-6, and 1.5 * 2^20: as in bits.formats.scaled
        shift = tl.maximum(binade, scale * 0.015625) * 1572864.0
        x = tl.where(bits < 0x7F800000, x + shift - shift, float("nan"))
    return x


@triton.jit
def loaded(
    weight, bias, ROWS: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, LAST: tl.constexpr
):
    """A layer's weight [ROWS, columns] and bias [1, columns], with 0 beyond FROM and TO. In memory
    the weight is [FROM, TO], the LAST layer's [TO, FROM]."""
    WIDE: tl.constexpr = triton.next_power_of_2(TO) if TO > SIDE else SIDE
    i, o = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
    w = tl.load(
        weight + (i + FROM * o if LAST else i * TO + o), mask=(i < FROM) & (o < TO), other=0.0
    )
    return w, tl.load(bias + o, mask=o < TO, other=0.0)


@triton.jit
def layers_of(network, agent, SIZES: tl.constexpr):
    """All layers of an agent, `loaded` before the loop over time."""
    first, first_bias, hidden, hidden_bias, heads, heads_bias, _ = network
    F: tl.constexpr = SIZES[0]
    A: tl.constexpr = SIZES[2]
    H: tl.constexpr = SIZES[3]
    LAYERS: tl.constexpr = SIZES[8]
    found = (loaded(first + agent * F * H, first_bias + agent * H, SIDE, F, H, False),)
    for i in tl.static_range(LAYERS - 1):
        w, b = (
            hidden + (agent * (LAYERS - 1) + i) * H * H,
            hidden_bias + (agent * (LAYERS - 1) + i) * H,
        )
        found += (loaded(w, b, H, H, H, False),)
    found += (loaded(heads + agent * A * H, heads_bias + agent * A, H, H, A, True),)
    return found


@triton.jit
def outputs_of(x, layers, inside, LAYERS: tl.constexpr, ROUND: tl.constexpr):
    """An agent's outputs [B, 16] for observations [B, 16]. ROUND has for each layer two numbers of
    `cast`: that of its inputs times 4, plus that of its results."""
    for i in tl.static_range(LAYERS + 1):
        w, b = layers[i]
        y = tl.dot(cast(x, inside, ROUND[i] // 4), w, input_precision="ieee") + b
        x = cast(
            y if i == LAYERS else tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL),
            inside,
            ROUND[i] % 4,
        )
    return x


@triton.jit
def play(
    start,
    network,
    rollout,
    counts,
    SIZES: tl.constexpr,
    ROUND: tl.constexpr,
    ADVANCE: tl.constexpr,
    OBSERVE: tl.constexpr,
):
    """T steps of up to ROWS of an agent's N environments, of ALL. The arguments are tuples, as in
    Fused.__call__, with a ROUND of each layer, and the task's two functions."""
    states, elapsed_of, done_of, noise, starts = start
    obs, outputs, actions, rewards, flags = rollout
    T, N, FIRST_AGENT, ALL = counts
    F: tl.constexpr = SIZES[0]
    K: tl.constexpr = SIZES[1]
    A: tl.constexpr = SIZES[2]
    CHANNELS: tl.constexpr = SIZES[4]
    MAX_STEPS: tl.constexpr = SIZES[5]
    ROWS: tl.constexpr = SIZES[6]
    GAUSSIAN: tl.constexpr = SIZES[7]
    agent = tl.program_id(1)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = own < N
    at = (FIRST_AGENT + agent).to(tl.int64) * N + own
    column = tl.arange(0, SIDE)[None, :]
    rows = at[:, None]
    rows_in = inside[:, None]
    of_state = rows_in & (column < K)
    of_obs = rows_in & (column < F)
    of_action = rows_in & (column < A)
    state = tl.load(states + rows * K + column, mask=of_state, other=0.0)
    seen = tl.load(obs + rows * F + column, mask=of_obs, other=0.0)
    elapsed = tl.load(elapsed_of + at, mask=inside, other=0)
    done = tl.load(done_of + at, mask=inside, other=0) != 0
    layers = layers_of(network, agent, SIZES)
    for t in range(T):
        x = outputs_of(seen, layers, inside, SIZES[8], ROUND)
        now = at + t * ALL
        own_action = now[:, None] * A + column
        tl.store(outputs + own_action, x, mask=of_action)
        if GAUSSIAN:
            drawn = tl.load(noise + own_action, mask=of_action, other=0.0)
            action = (
                x
                + tl.load(
                    network[6] + (FIRST_AGENT + agent) * A + column, mask=column < A, other=0.0
                )
                * drawn
            )
            tl.store(actions + own_action, action, mask=of_action)
        else:
            if A == 2:
                difference = tl.sum(tl.where(column == 1, x, 0.0), 1) - tl.sum(
                    tl.where(column == 0, x, 0.0), 1
                )
                chosen = (difference > tl.load(noise + now, mask=inside, other=0.0)).to(tl.int32)
            else:
                drawn = tl.load(noise + own_action, mask=of_action, other=0.0)
                # Beyond, if all are NaN
                chosen = tl.minimum(
                    tl.argmax(tl.where(column < A, x + drawn, -float("inf")), 1), A - 1
                )
            tl.store(actions + now, chosen.to(tl.int64), mask=inside)
            action = chosen.to(tl.float32)
        moved, reward, terminated = ADVANCE(state, action)
        new = starts + now[:, None] * (K + CHANNELS) + column
        state = tl.where(done[:, None], tl.load(new, mask=of_state, other=0.0), moved)
        seen = OBSERVE(state)
        if CHANNELS:
            other = column >= F - CHANNELS
            seen = tl.where(
                other, tl.load(new + K + CHANNELS - F, mask=of_obs & other, other=0.0), seen
            )
        elapsed = tl.where(done, 0, elapsed + 1)
        terminated = terminated & (done == 0)
        truncated = (elapsed >= MAX_STEPS) & (terminated == 0)
        flag = terminated.to(tl.int32) + 2 * truncated.to(tl.int32) + 4 * done.to(tl.int32)
        tl.store(rewards + now, tl.where(done, 0.0, reward), mask=inside)
        tl.store(flags + now, flag.to(tl.uint8), mask=inside)
        tl.store(obs + (now[:, None] + ALL) * F + column, seen, mask=of_obs)
        done = terminated | truncated
    tl.store(states + rows * K + column, state, mask=of_state)
    tl.store(elapsed_of + at, elapsed, mask=inside)
    tl.store(done_of + at, done.to(tl.int8), mask=inside)


class Fused:
    """`rollout.unroll` for the networks of S agents, with one launch for the agents of a precision.

    `acting` makes from the model an object with the attributes `parts` and `spread` of
    population.Policy. If it returns None, `unroll` itself is called. The environment's attributes
    are taken as they are now.

    Raises NotImplementedError if there is no kernel, which is so for

    - a task with its own `step`, or with other operations than FORMS
    - more than 16 features, numbers in a state, or actions
    - layers whose width is none of WIDTHS, or too many layers
    - roundings other than ROUNDINGS
    - e4m3, whose scale is that of all rows of an agent, with more rows than MOST_RESULTS allows in
      one program
    """

    def __init__(self, env: TensorEnv, model, acting: Callable):
        policy = acting(model)
        self.acting = acting
        self.gaussian = policy.spread is not None
        self.envs = env.num_envs // policy.parts[-1][0].stop
        width = policy.parts[0][1][0][0].shape[-1]  # of the first weights [S, I, O]
        self.sizes = sizes = len(env.bounds[0]), env.state_size, env.num_actions, width
        used = {
            x for _, layers in policy.parts for each in numbers(layers) for x in divmod(each, 4)
        }
        self.rows = (
            max(SIDE.value, triton.next_power_of_2(self.envs)) if E4M3.value in used else SIDE.value
        )
        weights = (len(policy.parts[0][1]) - 2) * width**2
        if (
            max(sizes[:3]) > SIDE.value
            or width not in WIDTHS
            or self.rows * width > MOST_RESULTS
            or weights > MOST_WEIGHTS
        ):
            raise NotImplementedError(f"no kernel for {sizes} numbers and {self.envs} environments")
        for name in ("step", "draw", "_observe"):
            if getattr(type(env), name) is not getattr(TensorEnv, name):
                raise NotImplementedError(f"the task has a {name} of its own")
        twin = copy.deepcopy(env)
        before = versions(twin)
        twin.draw(1)
        for name, (x, version) in versions(twin).items():
            old, its_version = before.get(name, (None, -1))
            # Set anew, or a tensor changed in place
            if name != "draws" and (x is not old or version != its_version):
                raise NotImplementedError("drawing starts changes the task")
        state = torch.zeros(1, env.state_size, device=env.device)
        action = (
            state.new_zeros(1, env.num_actions)
            if self.gaussian
            else state.new_zeros(1, dtype=torch.int64)
        )
        self.advance = written(env, "advance", {"state": state, "action": action})
        self.observe = written(env, "observe", {"state": state})

    def __call__(
        self, model, env: TensorEnv, noise: torch.Tensor, starts: torch.Tensor, state: None = None
    ):
        """Does what rollout.unroll does, with the agents' present weights."""
        policy = self.acting(model)
        if policy is None:
            return unroll(model, env, noise, starts, state)
        length = len(noise)
        count = env.num_envs
        F, _, A, _ = self.sizes
        states = env.state.clone(memory_format=torch.contiguous_format)
        elapsed = env.elapsed.clone()
        done = env.done.byte()
        obs = env.obs.new_empty(length + 1, count, F)
        outputs = env.obs.new_empty(length, count, A)
        rewards = env.obs.new_empty(length, count)
        flags = torch.empty(length, count, dtype=torch.uint8, device=obs.device)
        actions = torch.empty_like(outputs) if self.gaussian else flags.long()
        obs[0] = env.obs
        starts = starts.contiguous()
        noise = noise.contiguous()
        deviations = policy.spread
        if self.gaussian:
            deviations = Gaussian.outputs(policy.spread, policy.spread)[..., A:].exp().contiguous()
        warps = 2 if self.rows * self.sizes[3] <= 1024 else 8  # measured on an H200
        for part, layers in policy.parts:
            weights, biases, _ = zip(*layers, strict=True)
            hidden = [torch.stack(x, 1) if x else None for x in (weights[1:-1], biases[1:-1])]
            with torch.cuda.device_of(obs):  # Triton launches on the current device
                play[triton.cdiv(self.envs, self.rows), part.stop - part.start](
                    (states, elapsed, done, noise, starts),
                    (
                        weights[0],
                        biases[0].contiguous(),
                        *hidden,
                        weights[-1],
                        biases[-1].contiguous(),
                        deviations,
                    ),
                    (obs, outputs, actions, rewards, flags),
                    (length, self.envs, part.start, count),
                    (
                        *self.sizes,
                        env.channels,
                        env.max_steps,
                        self.rows,
                        self.gaussian,
                        len(layers) - 1,
                    ),
                    numbers(layers),
                    self.advance,
                    self.observe,
                    num_warps=warps,
                )
        env.state = states
        env.obs = obs[-1].clone()
        env.elapsed = elapsed
        env.done = done.bool()
        if self.gaussian:
            outputs = Gaussian.outputs(
                outputs.unflatten(1, (len(policy.spread), -1)), policy.spread
            ).flatten(1, 2)
        return (obs, actions, rewards, flags, outputs), None


def versions(env: TensorEnv) -> dict[str, tuple]:
    """An environment's attributes. Tensors come with the number of times they were changed."""
    return {name: (x, getattr(x, "_version", 0)) for name, x in vars(env).items()}


def numbers(layers: list[tuple]) -> tuple[int, ...]:
    """ROUND of each layer, as in `outputs_of`. Raises NotImplementedError for roundings that are
    not among ROUNDINGS."""
    found = [(rounding.inputs, rounding.result) for *_, rounding in layers]
    if not {*itertools.chain(*found)} <= {*ROUNDINGS}:
        raise NotImplementedError("no kernel for these roundings")
    return tuple(4 * ROUNDINGS.index(inputs) + ROUNDINGS.index(result) for inputs, result in found)


def kernel_loop(env: TensorEnv, model, acting: Callable) -> Fused | None:
    """Makes a Fused, and tries it in a short rollout on a copy of the environment.

    Returns None if there is no kernel, or if it does not run here. In the second case there is a
    warning. Triton needs a C compiler, and a GPU with shared memory for the weights of all layers.
    """
    zeros = functools.partial(torch.zeros, device=env.device)
    try:
        loop = Fused(env, model, acting)
        noise = zeros(
            16, env.num_envs, *[env.num_actions] * (loop.gaussian or env.num_actions != 2)
        )
        with torch.no_grad():
            loop(
                model, copy.copy(env), noise, zeros(16, env.num_envs, env.state_size + env.channels)
            )
        return loop
    except NotImplementedError:
        return None
    except Exception as error:  # Triton, the compiler or the driver may raise anything
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        warnings.warn(
            f"agents act step by step, because their kernel does not run here: {reason}",
            stacklevel=2,
        )
        return None
