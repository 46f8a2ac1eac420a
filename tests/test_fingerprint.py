"""A fingerprint changes in the parts whose numbers have changed, and in no other."""

import functools
import re

import pytest
import results
import torch

from fp8rl import normalization, precision, processes
from fp8rl.bits.low_bit_adam import LowBitAdam
from fp8rl.fast_forward import Reuse
from fp8rl.fp8 import Float8Linear
from fp8rl.observation_codec import Codec
from fp8rl.population import population
from fp8rl.recurrent import RecurrentActorCritic
from fp8rl.sequences import corrections
from fp8rl.study import fingerprint, throughput
from fp8rl.tasks import lqr
from fp8rl.tasks.gymnasium_env import GymEnv

pytestmark = pytest.mark.xdist_group("fingerprint")  # of this code is computed once


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
    found = results.parts_of(fingerprint.fingerprint())
    return {name for name, hash in found.items() if plain[name] != hash}


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
# The part that must show a change; and the change: the object, its attribute, what to do with the
# attribute's value.
CHANGES = {
    "float8linear": (Float8Linear, "forward", of_result(larger)),
    "gru": (RecurrentActorCritic, "gru", of_result(larger)),
    "normalized": (normalization, "LIMIT", lambda limit: 0.1),
    "lowbit": (LowBitAdam, "_update", with_larger_steps),
    "gymnasium": (GymEnv, "step", of_result(with_larger_rewards)),
    "ranks": (processes, "all_reduce", with_larger_sums),
    "codecs": (Codec, "__init__", with_coarser_int8),
    "tasks": (lqr, "PUSH_COST", larger),
    "reuse": (Reuse, "policy", of_result(with_larger_outputs)),
    "autocast": (
        precision,
        "PRECISIONS",
        lambda known: known | {"fp16": FP16._replace(loss_scale=2.0**40)},
    ),
    "acting": (population, "clips_by_learner", lambda rule: lambda config: False),
    "sequences": (corrections, "BOUND", lambda bound: 1.001),
    "defaults": (fingerprint, "Config", lambda config: functools.partial(config, gamma=0.97)),
}


@pytest.mark.parametrize("digit", range(4))
def test_changes_show_in_their_parts_alone(plain, digit, monkeypatch):
    """Several changes at once, those whose number has this binary digit: no two parts have all
    digits in common, so one that showed in another's part would be seen."""
    changes = {
        part: change for i, (part, change) in enumerate(CHANGES.items(), 1) if i >> digit & 1
    }
    for where, name, change in changes.values():
        monkeypatch.setattr(where, name, change(getattr(where, name)))
    assert changed(plain) == changes.keys()


def test_bfloat16_is_seen(plain, monkeypatch):
    """Of all parts, only these two train in bfloat16."""
    known = precision.PRECISIONS
    monkeypatch.setattr(precision, "PRECISIONS", known | {"bf16": precision.Rules()})
    named = ("autocast", "populations")
    some = {name: training for name, training in fingerprint.trainings().items() if name in named}
    monkeypatch.setattr(fingerprint, "trainings", lambda: some)
    monkeypatch.setattr(fingerprint, "core", lambda: [])
    monkeypatch.setattr(fingerprint, "examined", lambda: [])
    found = results.parts_of(fingerprint.fingerprint())
    assert {name for name in named if found[name] != plain[name]} == {"autocast"}


def test_a_fingerprint_has_its_parts_in_one_line(plain, monkeypatch):
    """They are the same with several threads, and the number of threads stays what it was."""
    monkeypatch.setattr(throughput, "own_fingerprint", throughput.own_fingerprint.__wrapped__)
    torch.set_num_threads(2)
    try:
        line = throughput.origin()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert re.fullmatch(r".+; code [\da-f]{8}(-[\da-f]{8}){4}(, \w+ [\da-f]{8})+", line)
    assert results.parts_of(line.split("; code ")[1]) == plain
    assert plain.keys() == {*results.PARTS, *fingerprint.trainings()}
