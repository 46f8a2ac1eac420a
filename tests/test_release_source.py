"""Defaults and code are read from a release without importing it."""

import zipfile
from datetime import date

import pytest
from release_source import Changed, Release

CONFIG = """
import not_installed

@dataclass
class Config(not_installed.Base):
    clip: float = 0.2
    level: str = field(default="token", metadata={"help": "..."})
    names: list = field(default_factory=list)
    path: str

def main(folder, *, steps=10, seed):
    parser.add_argument("--upper", type=float, default=5.0)
    parser.add_argument("--fast", action="store_true")
"""
LOSS = """
class Trainer:
    def loss(self, pi, mu):
        if self.sequence and pi is not None:
            # a comment
            ratio = (pi - mu).sum(
                dim=-1
            )
        engine = start(mode="processed", settings={"seed": 1})
        return ratio.exp()
"""


@pytest.fixture
def release(tmp_path):
    with zipfile.ZipFile(tmp_path / "stack.whl", "w") as wheel:
        for name, text in {
            "stack/config.py": CONFIG,
            "stack/loss.py": LOSS,
            "stack/trainer.yaml": "correction:\n  level: null\n  upper: 2.0\n",
            "other/loss.py": "",
        }.items():
            wheel.writestr(zipfile.ZipInfo(name, (2026, 10, 15, 0, 0, 0)), text)
    return Release.unpacked(tmp_path / "stack.whl", tmp_path / "stack-1.0")


def test_a_default_is_read_where_it_stands(release):
    assert release.field("stack/config.py", "Config", "clip") == 0.2
    assert release.field("stack/config.py", "Config", "level") == "token"
    assert release.field("stack/config.py", "Config", "names") == "list"
    assert release.parameter("stack/config.py", "main", "steps") == 10
    assert release.option("stack/config.py", "--upper") == 5.0
    assert release.option("stack/config.py", "--fast") is None
    assert release.yaml_value("stack/trainer.yaml", "correction.level") is None
    assert release.yaml_value("stack/trainer.yaml", "correction.upper") == 2.0
    assert release.dated == date(2026, 10, 15)


@pytest.mark.parametrize(
    "read",
    [
        lambda release: release.field("stack/config.py", "Config", "path"),
        lambda release: release.field("stack/config.py", "Settings", "clip"),
        lambda release: release.has_defaults("stack/config.py", "Config", clip=0.3),
        lambda release: release.parameter("stack/config.py", "main", "seed"),
        lambda release: release.option("stack/config.py", "--lower"),
        lambda release: release.yaml_value("stack/trainer.yaml", "correction.lower"),
        lambda release: release.text("config.yaml"),
        lambda release: release.text("loss.py"),  # two files
        lambda release: release.holds("stack/loss.py", "Trainer.loss", "ratio = pi - mu"),
        lambda release: release.lacks("processed"),
        lambda release: release.lacks("sum", "stack/loss.py", "Trainer.loss"),
    ],
)
def test_what_a_release_does_not_have_is_not_passed_over(release, read):
    with pytest.raises(Changed, match=r"stack-1\.0"):
        read(release)


def test_code_is_found_whatever_its_layout(release):
    release.holds(
        "stack/loss.py",
        "Trainer.loss",
        "ratio = (pi - mu).sum(dim=-1)",  # a statement, over three lines
        "ratio.exp()",  # a part of one
        "self.sequence and pi is not None",  # a condition
        "mode = 'processed'",  # a keyword argument
        "seed = 1",  # an entry of a dictionary
    )
    release.lacks("mean", "stack/loss.py", "Trainer.loss")
    release.lacks("comment", "stack/loss.py", "Trainer.loss")
    release.lacks("raw_logprobs")
