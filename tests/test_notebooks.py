"""The form of the notebooks; nbmake runs their content."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import results
from helpers import figures
from IPython.core.inputtransformer2 import TransformerManager

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


@pytest.mark.parametrize("missing", [False, True])
def test_first_code_cell_installs_the_package_only_where_it_is_missing(code, missing, monkeypatch):
    calls = []
    shell = SimpleNamespace(run_line_magic=lambda *magic: calls.append(magic))
    if missing:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(TransformerManager().transform_cell(source(code[0])), {"get_ipython": lambda: shell})
    assert [magic for magic, _ in calls] == ["pip"] * missing
    assert all(
        re.fullmatch(r"install --quiet (\.\.|git\+https://github\.com/[\w.-]+/[\w.-]+)", line)
        for _, line in calls
    )


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
        assert "<!-- benchmarks/results/" in text or page == results.READMES[1]
