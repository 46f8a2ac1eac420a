"""CUDA graphs: launch a whole iteration as one.

A small network's update is a few hundred kernels of microseconds each, and the CPU that launches them one by one is what takes
the time. A CUDA graph records the launches once and replays them all with a single call. The price: a replay does the very
same launches on the very same addresses. So nothing inside may ask the host for a number, inputs must stand in tensors that
stay in place, the results of a replay are overwritten by the next, and what changes between replays (the learning rate, the loss
scale, Adam's step count, the random generator's offset) must live on the device. That is why Adam must be `capturable`.
"""

from collections.abc import Callable

import torch

from .losses import Rollout

# Calls before the capture, on the stream that it will use: libraries and lazily made state (Adam's, the scaler's) settle in them.
WARMUP = 3
GRAPHED = ("cuda",)  # kinds of devices that have graphs


class Graphed:
    """A function of at most one Rollout, run as it is for its first calls and captured at the next; replayed from then on.

    Args:
        function: works on CUDA tensors without asking the host. What it keeps from call to call it must write in place.
        generator: the random generator that it draws from, so that each replay draws new numbers, the same as without a graph.

    What it returns is overwritten by the next call.
    """

    def __init__(self, function: Callable, generator: torch.Generator):
        self.function, self.generator = function, generator
        self.stream = torch.cuda.Stream(generator.device)
        self.calls = 0
        self.graph = None

    def __call__(self, *batches: Rollout):
        self.calls += 1
        if self.calls <= WARMUP:
            outside = torch.cuda.current_stream(self.stream.device)
            self.stream.wait_stream(outside)
            with torch.cuda.stream(self.stream):
                result = self.function(*batches)
            outside.wait_stream(self.stream)
            return result
        if self.graph is None:
            self.inputs = [Rollout(*(None if x is None else x.clone() for x in batch)) for batch in batches]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self.stream.device):  # torch 2.11 and 2.12 register the generator on the current device
                graph.register_generator_state(self.generator)
                with torch.cuda.graph(graph, stream=self.stream):
                    self.result = self.function(*self.inputs)
            self.graph = graph
        for ours, given in zip(self.inputs, batches, strict=True):
            for mine, new in zip(ours, given, strict=True):
                if mine is not None:
                    mine.copy_(new)
        self.graph.replay()
        return self.result
