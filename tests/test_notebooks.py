"""The form of the notebooks; nbmake runs their content."""

import ast
import csv
import functools
import itertools
import json
import re
import runpy
import sys
from pathlib import Path

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import pytest
import results
import torch
from helpers import figures
from torch.distributions import Distribution

from fp8rl import losses

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAIN = "fp8_actor_critic"


def source(cell) -> str:
    return "".join(cell["source"])


def tags(cell) -> list[str]:
    return cell["metadata"].get("tags", [])


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return json.loads(path.read_text())


@pytest.fixture
def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def prose(notebook):
    return "\n\n".join(
        source(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    )


def test_parameters_are_literals_near_the_top(notebook):
    tagged = [i for i, cell in enumerate(notebook["cells"]) if "parameters" in tags(cell)]
    assert len(tagged) == 1 and tagged[0] < 5
    for statement in ast.parse(source(notebook["cells"][tagged[0]])).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)


def test_a_cell_installs_the_package_only_where_it_is_missing(code):
    (cell,) = [source(cell) for cell in code if "%pip" in source(cell)]
    where = r"(\.\.|git\+https://github\.com/[\w.-]+/[\w.-]+)"
    condition = r'if importlib\.util\.find_spec\("fp8rl"\) is None:'
    assert re.search(rf"(?m)^{condition}\n    %pip install --quiet {where}$", cell)


def test_outputs_are_those_of_one_full_run(path, code):
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(
        output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs
    )
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < 1_000_000


def test_exercises_are_shown_unsolved_and_their_solutions_are_hidden():
    """nbmake runs both: an exercise must fail, which its tag says. Its error is not committed."""
    cells = json.loads((ROOT / "notebooks" / f"{MAIN}.ipynb").read_text())["cells"]
    exercises = [i for i, cell in enumerate(cells) if "raises-exception" in tags(cell)]
    assert len(exercises) == 3
    for at in exercises:
        assert not cells[at]["outputs"]
        assert tags(cells[at + 1]) == ["solution"] and cells[at + 1]["metadata"]["jupyter"] == {
            "source_hidden": True
        }


@pytest.fixture
def settings_of_notebook(monkeypatch, tmp_path):
    """What the main notebook sets in the process is put back."""
    monkeypatch.setattr(Distribution, "_validate_args", Distribution._validate_args)
    monkeypatch.setattr(plt, "show", plt.close)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    gymnasium.registry.pop("CustomEnv-v0", None)


@pytest.fixture
def without_package(settings_of_notebook, monkeypatch):
    """The package cannot be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fp8rl"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "fp8rl", None)


def cells_of_main(until: str = "", tag: str = "") -> list[str]:
    """Sources of the main notebook's code cells, before a text or with a tag."""
    cells = json.loads((ROOT / "notebooks" / f"{MAIN}.ipynb").read_text())["cells"]
    before = itertools.takewhile(lambda cell: not until or until not in source(cell), cells)
    code = [cell for cell in before if cell["cell_type"] == "code"]
    return [
        source(cell).removeprefix("%matplotlib inline\n")
        for cell in code
        if tag in (*tags(cell), "")
    ]


def test_sections_1_to_5_run_without_the_package(without_package):
    parameters, *cells = cells_of_main(until="## 6.")
    names = {}
    exec(parameters, names)
    names["STEPS"] = 8_192
    for cell in cells:
        exec(cell, names)
    assert names["arms"] and "study" not in names


def test_script_is_what_the_notebook_has():
    make_script = runpy.run_path(ROOT / "notebooks/make_script.py")
    assert (ROOT / "notebooks/actor_critic.py").read_text() == make_script["script"]()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_script_runs_without_the_package_and_gives_the_numbers_of_the_cells(
    precision, without_package
):
    arguments = ["--precision", precision, "--seed", "3", "--steps", "4096", "--out", "cart"]
    runpy.run_path(ROOT / "notebooks/actor_critic.py")["main"](arguments)
    names = definitions_of_main()
    learn = names["replay"](names["corrected_update"], names["LENGTH"])
    history = names["train"](names["new_agent"](precision, 3), learn, 4_096, 3)
    lines = csv.DictReader(Path("cart.csv").read_text().splitlines())
    rows = [{name: float(x) for name, x in row.items()} for row in lines]
    np.testing.assert_equal(rows, history)
    assert Path("cart.png").stat().st_size > 1_000


def test_script_refuses_in_one_line(without_package, capsys):
    main = runpy.run_path(ROOT / "notebooks/actor_critic.py")["main"]
    Path("cart.csv").touch()
    for arguments, message in {
        "--precision fp8": "--precision fp8 needs the package fp8rl",
        "--steps 256": "--steps is 256: give at least 4,096",
        "--out cart": "--out: cart.csv exists",
    }.items():
        with pytest.raises(SystemExit):
            main(arguments.split())
        assert message in capsys.readouterr().err


def definitions_of_main() -> dict:
    """What sections 1 to 5 of the main notebook define, by name."""
    names = {}
    for cell in cells_of_main(until="## 6.", tag="definitions"):
        exec(cell, names)
    return names


def test_without_ratio_and_clip_the_corrected_update_is_a2c(settings_of_notebook):
    names = definitions_of_main()
    rollout = names["Carts"](0).collect(names["new_agent"]("fp32", 0))
    uncorrected = functools.partial(names["corrected_update"], ratio=False, clip=None)
    agents = [names["new_agent"]("fp32", 0) for _ in range(2)]
    for agent, update in zip(agents, (names["a2c_update"], uncorrected), strict=True):
        update(agent, rollout)
    one, other = (agent.model.state_dict() for agent in agents)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_v_trace_of_the_notebook_is_the_packages(settings_of_notebook):
    names = definitions_of_main()
    torch.manual_seed(0)
    shape = (16, 4)
    terminated, valid = torch.rand(2, *shape) < torch.tensor([0.1, 0.9]).view(2, 1, 1)
    obs = torch.zeros(17, 4, 2)
    rollout = names["Rollout"](
        obs, obs[1:, :, 0], torch.rand(shape), terminated, valid, obs[1:, :, 0]
    )
    value = torch.rand(17, 4)
    log_ratio = torch.randn(shape)
    _, advantage = names["vtrace"](rollout, value, log_ratio.exp().clamp(max=1))
    reward = names["REWARD_SCALE"] * rollout.reward
    discount = torch.where(terminated, 0, names["GAMMA"])
    package = losses.vtrace(value, reward, discount, log_ratio, valid, names["LAMBDA"])
    torch.testing.assert_close(advantage, package.advantage)


def test_figures_beside_a_link_to_a_table_are_the_tables(path, prose):
    for paragraph in prose.split("\n\n"):
        for link in re.findall(r"\]\((\S+/results/\S+\.md)\)", paragraph):
            table, text = (
                (path.parent / link).read_text(),
                " ".join(re.sub(r"\(\S+/\S+\)", "", paragraph).split()),
            )
            assert figures(text) <= figures(table), link
            machine = re.search(r"` on (.+?, \d+ cores(?:, \w+ with \w+ bf16)?)", table)[1]
            assert machine in text, link


def test_tables_in_readmes_are_the_committed_results():
    assert len(results.PAGES) > 5
    for page in results.READMES:
        text = page.read_text()
        assert results.filled(text) == text, page
        assert "<!-- benchmarks/results/" in text or page == results.READMES[0]
