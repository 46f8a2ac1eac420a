import pytest
import torch
from helpers import small
from torch import nn

from fp8rl.fp8 import E4M3, E5M2, Float8Linear, Quantized, cast, quantize
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.scale import quantization
from fp8rl.scale.machine import build
from fp8rl.scale.quantization import measure, recorded


def snr_db(x: torch.Tensor, reference: torch.Tensor) -> float:
    error = x.double() - reference.double()
    return 10 * torch.log10(reference.double().square().sum() / error.square().sum()).item()


def test_measure_counts_what_was_lost():
    x = torch.tensor([[500.0, 2.0**-20, 0.0, 1.0]])
    unscaled = Quantized(cast(x, E4M3), torch.ones(()))
    numbers = measure(x, unscaled)
    assert numbers["saturated"] == 1 / 4 and numbers["flushed"] == 1 / 3 and numbers["scale"] == 1
    assert numbers["snr_db"].item() == pytest.approx(snr_db(unscaled.dequantize(), x), abs=1e-3)
    assert measure(torch.tensor([[torch.nan, torch.inf, 1.0]]), quantize(torch.ones(1, 3)))["nonfinite"] == 2


def test_of_a_large_matrix_the_first_rows_are_measured(monkeypatch):
    monkeypatch.setattr(quantization, "LOOKED_AT", 1024)
    x = torch.randn(100, 64)
    x[:16] /= 8  # under the scale of the whole
    quantized = quantize(x)
    found, first = measure(x, quantized), measure(x[:16], quantized._replace(data=quantized.data[:16]))
    assert {name: value.item() for name, value in found.items()} == {name: value.item() for name, value in first.items()}


def test_with_scales_of_rows_it_measures_each_row_by_its_own(monkeypatch):
    x = torch.randn(100, 64)
    x[3] *= 1e6
    by_row, by_tensor = (measure(x[:, :], quantize(x, E4M3, scales)) for scales in ("row", "tensor"))
    assert by_row["flushed"] == 0 < by_tensor["flushed"] and by_row["scale"] == by_tensor["scale"]
    monkeypatch.setattr(quantization, "LOOKED_AT", 1024)
    first = quantize(x[:16], E4M3, "row")
    assert measure(x, quantize(x, E4M3, "row")) == measure(x[:16], first)


def test_what_is_not_finite_is_not_counted_as_saturated():
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])
    found = measure(x, quantize(x))
    assert found["saturated"] == 0 and found["nonfinite"] == 3 and found["scale"].isfinite()


def test_recorded_names_layer_tensor_and_statistic():
    model, x, grad = nn.Sequential(Float8Linear(64, 64)), torch.randn(32, 64), 1e-5 * torch.randn(32, 64)
    with recorded(model) as statistics:
        model(x).backward(grad)
    assert {name.split(".")[2] for name in statistics} == {"input", "weight", "gradient"}
    assert {name.split(".")[3] for name in statistics} == {"saturated", "flushed", "scale", "snr_db", "nonfinite"}
    assert statistics["fp8.0.gradient.scale"] == quantize(grad, E5M2).scale
    before = dict(statistics)
    model(3 * x).backward(grad)  # after the region nothing is recorded
    assert statistics == before


def test_without_a_layer_in_fp8_nothing_is_recorded():
    model = ActorCritic()
    with recorded(model) as statistics:
        model(torch.rand(16, 2))[0].sum().backward()
    assert statistics == {}


def test_a_learner_records_only_where_it_is_asked_to():
    run = build(small("fp8"))
    rollout = run.collect()
    plain, found = run.learner.update(rollout), run.learner.update(rollout, record=True)
    more = found.keys() - plain.keys()
    names = {f"fp8.hidden.0.{tensor}" for tensor in ("input", "weight", "gradient")}
    assert plain.keys() < found.keys() and {name.rpartition(".")[0] for name in more} == names
    assert run.model.hidden[0].watcher is None


def test_a_bad_number_is_counted():
    precision = Precision("fp8")
    model, obs = precision.prepare(ActorCritic()), torch.rand(16, 2)
    obs[3, 1], obs[4, 0] = torch.inf, torch.nan
    with recorded(model) as statistics:
        model(obs)
    assert statistics["fp8.hidden.0.input.nonfinite"] > 0
