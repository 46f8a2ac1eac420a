"""The callback of docs/stack_defaults.md writes a file that the doctor reads."""

import re
import sys
from types import ModuleType, SimpleNamespace

import torch
from results import ROOT

from fp8rl.dumps.dump import read_dump
from fp8rl.dumps.mismatch import mismatch


class TrainerOfTwoSteps:
    """What the callback uses of TRL's GRPOTrainer: batches of padded completions."""

    def add_callback(self, callback) -> None:
        self.callback = callback

    def train(self) -> None:
        for step in (1, 2):
            self._buffered_inputs = [self.batch(width=4 + step) for _ in range(3)]
            state = SimpleNamespace(global_step=step, is_world_process_zero=True)
            self.callback.on_step_end(None, state, None)

    def batch(self, width: int) -> dict[str, torch.Tensor]:
        lengths = torch.randint(1, width + 1, (8, 1))
        learner = -torch.rand(8, width)
        return {
            "completion_mask": (torch.arange(width) < lengths).int(),
            "old_per_token_logps": learner,
            "sampling_per_token_logps": learner.bfloat16().float(),
            "advantages": torch.randn(8),
        }


def test_the_callback_for_grpo_trainer(monkeypatch, tmp_path):
    page = (ROOT / "docs/stack_defaults.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    transformers = ModuleType("transformers")
    transformers.TrainerCallback = object
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    trainer = TrainerOfTwoSteps()
    exec(code, {"trainer": trainer, "__name__": "page"})
    trainer.train()
    dump = read_dump(tmp_path / "dump.pt")
    report = mismatch(**dump)
    assert report.sequences == 48
