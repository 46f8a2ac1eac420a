"""Triton's own compiler, which needs no GPU, compiles every kernel for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import PATIENCE

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [pytest.mark.cuda] * torch.cuda.is_available()

# Each script prints the bytes of the kernels that it compiles.
ACTING = """
import copy, torch, triton
from functools import partial
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp8rl.config import Config
from fp8rl.rollout import action_noise
from fp8rl.machine.gpu import acting_kernel
from fp8rl.machine.gpu.install import as_population
from fp8rl.build import build
from fp8rl.population.networks import Agents
from fp8rl.build import build_population

class Compiled:
    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **options):
        types = {torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}
        signature, constants = {}, {}
        for i, (parameter, x) in enumerate(zip(play.params, args)):
            if parameter.is_constexpr:
                signature[parameter.name], constants[i,] = "constexpr", x
                continue
            # A 1 is compiled in, and so is here a 0.
            kinds = [types[each.dtype] if isinstance(each, torch.Tensor) else (each or 0) > 1 and "i32" for each in x]
            signature[parameter.name] = tuple(kind or "constexpr" for kind in kinds)
            constants |= {(i, k): each for k, each in enumerate(x) if not kinds[k]}
        for capability in capabilities:
            target = GPUTarget("cuda", capability, 32)
            print(len(triton.compile(ASTSource(play, signature, constants), target, options).asm["cubin"]))

play, acting_kernel.play = acting_kernel.play, Compiled()
many = build_population([Config(steps=100_000, precision="fp8", env_id="CartPole-v1", hidden_size=16)])
one = build(Config(steps=100_000, precision="bf16", env_id="test_acting_kernel:Many", layers=3, hidden_size=16, num_envs=1, rollout_length=128))
for run, acting, capabilities in ((many, Agents.acting, (80,)), (one, partial(as_population, precision="bf16"), (90,))):
    with torch.no_grad():
        noise = action_noise(run.env, run.collector.length, run.collector.seed, "actions", 0)
        loop = copy.deepcopy(acting_kernel.Fused(run.env, run.model, acting))
        loop(run.model, run.env, noise, run.env.draw(len(noise)))
"""
INSTEAD_OF_MANY_LAUNCHES = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp8rl.machine.gpu.triton_kernels import COLUMNS, PAIRS, draw, recur

def compiled(kernel, kinds, **constants):
    signature = dict(zip(kernel.arg_names, kinds.split(), strict=True))
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): x for name, x in constants.items()})
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1 if kernel is recur else 4})

for seed, iteration in (("*i64", "*i64"), ("*i64", "*fp32"), ("i32", "i32")):
    print(len(compiled(draw, f"*i32 {seed} i32 {iteration} i32 i32 i32 constexpr", BLOCK=PAIRS).asm["cubin"]))
for begun, constants in (("*fp32", {}), ("constexpr", {"begun": None})):
    types = f"*fp32 *fp32 {begun} *fp32 i32 i32 constexpr constexpr"
    found = compiled(recur, types, **constants, REVERSE=not constants, BLOCK=COLUMNS)
    assert "cp.async" in found.asm["ptx"], "rows are not read ahead"
    print(len(found.asm["cubin"]))
"""
QUANTIZING = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp8rl.machine.gpu import triton_quantize

def compile(kernel, constants, capability, **types):
    signature = {p.name: "constexpr" if p.name in constants else types.get(p.name, "i32") for p in kernel.params}
    constants = {(i,): constants[p.name] for i, p in enumerate(kernel.params) if p.name in constants}
    source = ASTSource(kernel, signature, constants)
    print(len(triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8}).asm["cubin"]))

for x, capability, kinds in (("*fp32", 80, ((1, 3), (3, 2))), ("*bf16", 90, ((2, 2),))):
    compile(triton_quantize.largest, {"BLOCK": triton_quantize.SPAN}, capability, x=x, bits="*i32")
    for layouts, mantissa in kinds:
        own = {"MANTISSA": mantissa, "TILE": triton_quantize.TILE, "LAYOUTS": layouts}
        out, shape = ("*u8", "*u8", "*fp32"), ("i32", "i32")
        compile(triton_quantize.rounded, own, capability, x=x, found="*i32", out=out, shape=shape)
"""


def test_every_kernel_compiles_for_gpus_that_are_not_here(tmp_path):
    """Of capability 8.0 and 9.0. A process of its own, since kernels are interpreted in this one,
    and one for all, since it takes long to import torch."""
    own = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    own["TRITON_CACHE_DIR"] = str(tmp_path)
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    own["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, "-c", ACTING + INSTEAD_OF_MANY_LAUNCHES + QUANTIZING]
    options = {"capture_output": True, "text": True, "timeout": PATIENCE}
    done = subprocess.run(command, env=os.environ | own, **options)
    assert done.returncode == 0, done.stderr
    sizes = [int(line) for line in done.stdout.split()]
    assert len(sizes) == 2 + 5 + 5 and min(sizes[:2]) > 10_000 and min(sizes) > 1_000
