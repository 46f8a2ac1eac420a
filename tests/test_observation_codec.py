import math

import ml_dtypes
import numpy as np
import torch
from helpers import refused
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.replay.observation_codec import CODECS, Codec

LOW, HIGH = (-4.0, -1.0, 0.0), (4.0, 3.0, 10.0)
inside = st.lists(
    st.tuples(*(st.floats(low, high, width=32) for low, high in zip(LOW, HIGH, strict=True))),
    min_size=1,
    max_size=20,
)


@given(inside, st.sampled_from(CODECS))
def test_round_trip_stays_within_the_stated_error(rows, name):
    x, codec = torch.tensor(rows), Codec(name, LOW, HIGH)
    back = codec.decode(codec.encode(x))
    span = torch.tensor(HIGH) - torch.tensor(LOW)
    bound = torch.maximum(torch.tensor(LOW).abs(), torch.tensor(HIGH).abs())
    allowed = {
        "fp32": torch.zeros(3),
        "fp16": torch.maximum(x.abs() * 2**-11, torch.tensor(2**-25)),
        "bf16": torch.maximum(x.abs() * 2**-8, torch.tensor(2.0**-134)),
        "int8": span / 508,
        "fp8": torch.maximum(x.abs(), 2**-14 * bound) * 2**-4,
    }[name]
    assert ((back - x).abs() <= allowed * (1 + 1e-5) + (1e-6 if name == "int8" else 0)).all()
    assert codec.count_clipped(x).tolist() == [0, 0, 0]


def test_int8_is_affine_over_the_bounds_and_exact_at_middle_and_ends():
    codec = Codec("int8", LOW, HIGH)
    marks = torch.tensor([LOW, [0.0, 1.0, 5.0], HIGH])
    assert codec.encode(marks).tolist() == [[-127] * 3, [0] * 3, [127] * 3]
    torch.testing.assert_close(codec.decode(codec.encode(marks)), marks)


def test_fp8_is_e4m3_under_a_power_of_two():
    codec = Codec("fp8", LOW, HIGH)
    x = torch.linspace(-3, 3, 1001).unsqueeze(-1).expand(-1, 3)
    assert (codec.scale.log2() % 1 == 0).all()
    theirs = (x / codec.scale).numpy().astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(codec.encode(x).numpy(), theirs.view(np.uint8))


def test_what_cannot_be_stored_is_refused():
    for bounds in (
        ([0.0, -1.0], [1.0, math.inf]),
        ([0.0, 1.0], [1.0, 1.0]),
        ([0.0, -3e38], [1.0, 3e38]),
    ):
        refused("codec is 'int8' and feature 1 has bounds", Codec, "int8", *bounds)
    refused("codec is 'fp32' and feature 1", Codec, "fp32", [0.0, 0.0], [1.0, math.nan])
