"""docs/stack_defaults.md: its callback writes a file that the doctor reads, and its table agrees with
the releases that are installed here."""

import ast
import importlib.metadata
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from results import ROOT

from fp8rl.dumps import mismatch
from fp8rl.dumps.dump import read_dump


def batch_of_completions(width: int) -> dict[str, torch.Tensor]:
    """What TRL's GRPOTrainer keeps of padded completions."""
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
    callbacks = []
    trainer = SimpleNamespace(add_callback=callbacks.append)
    exec(code, {"trainer": trainer, "__name__": "page"})
    for step in (1, 2):
        trainer._buffered_inputs = [batch_of_completions(4 + step) for _ in range(3)]
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        callbacks[0].on_step_end(None, state, None)
    assert mismatch(**read_dump(tmp_path / "dump.pt")).numbers.sequences == 48


# Package, file, class, field, and its default in docs/stack_defaults_table.md
DEFAULTS = [
    ("trl", "trl/trainer/grpo_config.py", "GRPOConfig", "use_vllm", False),
    ("trl", "trl/trainer/grpo_config.py", "GRPOConfig", "vllm_importance_sampling_clip_max", 3.0),
    ("verl", "verl/workers/config/rollout.py", "RolloutConfig", "calculate_log_probs", False),
    ("areal", "areal/api/cli_args.py", "PPOActorConfig", "recompute_logprob", False),
    ("areal", "areal/api/cli_args.py", "PPOActorConfig", "use_decoupled_loss", False),
    ("ms-swift", "swift/rlhf_trainers/args_mixin.py", "GRPOArgumentsMixin", "epsilon", 0.2),
    ("skyrl", "skyrl/train/config/config.py", "AlgorithmConfig", "eps_clip_low", 0.2),
]


@pytest.mark.parametrize(("package", "file", "name", "field", "default"), DEFAULTS)
def test_a_default_is_what_the_installed_release_says(package, file, name, field, default):
    try:
        release = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if f"{package} {release.version} |" not in (ROOT / "docs/stack_defaults_table.md").read_text():
        pytest.skip(f"the table is of another release than {package} {release.version}")
    tree = ast.parse(release.locate_file(file).read_text())
    (config,) = (x for x in ast.walk(tree) if isinstance(x, ast.ClassDef) and x.name == name)
    found = {x.target.id: x.value for x in config.body if isinstance(x, ast.AnnAssign)}[field]
    if isinstance(found, ast.Call):  # field(default=...)
        (found,) = (x.value for x in found.keywords if x.arg == "default")
    assert ast.literal_eval(found) == default
