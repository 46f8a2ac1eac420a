"""A fingerprint changes in the parts whose numbers have changed, and in no other."""

import functools
import re

import pytest
import results
import torch

from fp8rl import normalization, precision, processes
from fp8rl.bits.low_bit_adam import LowBitAdam
from fp8rl.config import Config
from fp8rl.fast_forward import Reuse
from fp8rl.fp8 import Float8Linear
from fp8rl.observation_codec import Codec
from fp8rl.recurrent import RecurrentActorCritic
from fp8rl.study import fingerprint, throughput
from fp8rl.tasks import lqr
from fp8rl.tasks.gymnasium_env import GymEnv


@pytest.fixture(autouse=True, scope="module")
def shorter():
    """One iteration instead of two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fingerprint.SHORT, "steps", 512)
        yield


@pytest.fixture(scope="module")
def plain(shorter) -> dict[str, str]:
    """The hashes of this code, by part; the first two are one part."""
    return results.parts_of(fingerprint.fingerprint())


def changed(plain: dict[str, str]) -> set[str]:
    """The parts whose hashes are others now."""
    return {
        name
        for name, hash in results.parts_of(fingerprint.fingerprint()).items()
        if plain[name] != hash
    }


def of_result(change):
    """A function with `change` of what it returns."""

    def decorator(function):
        return lambda *args, **options: change(function(*args, **options))

    return decorator


def larger(x):
    return 1.01 * x


def with_larger_rewards(found):
    obs, reward, *rest = found
    return obs, larger(reward), *rest


def with_larger_outputs(found):
    output, state = found
    return larger(output), state


def with_larger_steps(update):
    def updated(self, p, *args):
        update(self, p, *args)
        p.mul_(1.01)

    return updated


def with_larger_sums(all_reduce):
    return staticmethod(lambda tensors: [larger(x) for x in all_reduce(tensors)])


def with_coarser_int8(init):
    def made(self, name, *args, **options):
        init(self, name, *args, **options)
        if name == "int8":
            self.scale *= 1.5

    return made


FP16 = precision.PRECISIONS["fp16"]
# What is changed: the object, its attribute, what to do with the attribute's value; and the parts
# that must show it.
CHANGES = {
    "an FP8 layer": (Float8Linear, "forward", of_result(larger), {"float8linear"}),
    "GRU": (RecurrentActorCritic, "gru", of_result(larger), {"gru"}),
    "normalized observations": (normalization, "LIMIT", lambda limit: 0.1, {"normalized"}),
    "an optimizer that packs": (LowBitAdam, "_update", with_larger_steps, {"lowbit"}),
    "Gymnasium": (GymEnv, "step", of_result(with_larger_rewards), {"gymnasium"}),
    "sums over processes": (processes, "all_reduce", with_larger_sums, {"ranks"}),
    "int8": (Codec, "__init__", with_coarser_int8, {"codecs"}),
    "a task": (lqr, "PUSH_COST", larger, {"tasks"}),
    "forward passes that are reused": (Reuse, "policy", of_result(with_larger_outputs), {"reuse"}),
    "float16": (
        precision,
        "PRECISIONS",
        lambda known: known | {"fp16": FP16._replace(loss_scale=2.0**40)},
        {"autocast"},
    ),
    "bfloat16": (
        precision,
        "PRECISIONS",
        lambda known: known | {"bf16": precision.Rules()},
        {"autocast"},
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_shows_in_its_part_alone(plain, what, monkeypatch):
    where, name, change, parts = CHANGES[what]
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    assert changed(plain) == parts


def test_defaults_are_a_part_of_their_own(plain, monkeypatch):
    monkeypatch.setattr(fingerprint, "Config", functools.partial(Config, gamma=0.97))
    assert changed(plain) == {"defaults"}


def test_a_fingerprint_has_its_parts_in_one_line(plain, capsys):
    line = throughput.origin()
    assert re.fullmatch(r".+; code [\da-f]{8}(-[\da-f]{8}){4}(, \w+ [\da-f]{8})+", line)
    assert results.parts_of(line.split("; code ")[1]) == plain
    assert plain.keys() == {*results.PARTS, *fingerprint.trainings()}
    torch.set_num_threads(2)
    try:
        assert not changed(plain) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
