"""The Python of docs/using_it.md runs."""

import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch

PAGE = (Path(__file__).parent.parent / "docs/using_it.md").read_text()
TRAIN, EVENTS, DOCTOR = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_doctor_reports_on_a_training_loop(capsys):
    model = torch.nn.Linear(16, 1)
    batches = [torch.randn(32, 16) for _ in range(96)]

    def train_step(model, optimizer, batch):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    names = {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-4),
        "batches": batches,
        "train_step": train_step,
    }
    exec(DOCTOR, names)
    report = capsys.readouterr().out
    for text in ("weights=bf16:", "weights=bf16:stochastic:", "m=e4m3:"):
        assert f"  {text} " in report


def test_an_agent_is_trained(capsys):
    assert "steps=100_000" in TRAIN
    exec(TRAIN.replace("100_000", "4_096"), {})
    assert 0 < float(capsys.readouterr().out.splitlines()[-1]) < 200


def test_the_columns_of_a_training_become_events(tmp_path, monkeypatch):
    tensorboard = MagicMock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/metrics.csv").write_text("steps,loss\n512,0.5\n1024,0.25\n")
    exec(EVENTS, {})
    writer = tensorboard.SummaryWriter.return_value.__enter__.return_value
    writer.add_scalar.assert_called_with("loss", 0.25, 1024)
