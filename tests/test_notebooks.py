"""The form of the notebooks; nbmake runs their content."""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
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


def test_the_main_notebook_is_there():
    assert MAIN in [path.stem for path in NOTEBOOKS]


def test_kernel_is_python3(notebook):
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


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


@pytest.mark.skipif(
    not (shutil.which("make") and shutil.which("perl")), reason="make address needs make and perl"
)
def test_an_address_makes_a_badge_and_goes_into_every_first_code_cell(tmp_path):
    assert "colab.research" not in (ROOT / "README.md").read_text()  # a badge that leads nowhere
    for name in ("Makefile", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for address in ("someone/some.thing", "someone-else/fp8rl"):  # a second time, too
        subprocess.run(["make", "address", f"REPOSITORY={address}"], cwd=tmp_path, check=True)
        readme = (tmp_path / "README.md").read_text()
        links = re.findall(r"\[!\[Open in Colab\]\(\S+\)\]\((\S+)\)", readme)
        at_colab = f"https://colab.research.google.com/github/{address}"
        assert links == [f"{at_colab}/blob/main/notebooks/{MAIN}.ipynb"]
        for path in NOTEBOOKS:
            cells = json.loads((tmp_path / "notebooks" / path.name).read_text())["cells"]
            first = next(source(cell) for cell in cells if cell["cell_type"] == "code")
            assert first.endswith(f"%pip install --quiet git+https://github.com/{address}")


def test_outputs_are_those_of_one_full_run(path, code):
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(
        output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs
    )
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < 1_000_000


def test_figures_are_shown_whatever_mplbackend_says(code):
    """Images of CI often set it to agg, with which the kernel would show none, and no error."""
    first = next(source(cell) for cell in code if "matplotlib" in source(cell))
    assert first.startswith("%matplotlib inline\n")


def test_outputs_show_a_picture_in_place_of_widgets(notebook, code):
    """Elsewhere than in the session that made it, a widget is an error message. Before a commit, drop
    its entry from each output, and `widgets` from the metadata; the picture stays."""
    assert "widgets" not in notebook["metadata"]
    types = [name for cell in code for output in cell["outputs"] for name in output.get("data", {})]
    assert "application/vnd.jupyter.widget-view+json" not in types


def test_sections_are_numbered_in_order(notebook, prose):
    """A heading that an edit has deleted leaves a gap, or a row of the first cell's table of sections
    that leads nowhere."""
    numbers = [int(number) for number in re.findall(r"(?m)^## (\d+)\. ", prose)]
    assert numbers and numbers == list(range(1, len(numbers) + 1))
    first = source(notebook["cells"][0])
    rows = [int(number) for number in re.findall(r"(?m)^\| (\d+) \| ", first)]
    assert set(rows) <= set(numbers)


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


def test_outputs_name_no_private_folder(code):
    text = json.dumps(
        [
            [
                {**o, "data": {k: v for k, v in o.get("data", {}).items() if "image" not in k}}
                for o in cell["outputs"]
            ]
            for cell in code
        ]
    )
    assert not re.search(r"/home/|/root/|/Users/|[A-Z]:\\\\", text) and str(ROOT) not in text


def test_code_reads_no_file_of_the_repository(code):
    """So the notebooks run beside an installed wheel, too."""
    assert not [
        source(cell) for cell in code if re.search(r"\.\./|__file__|benchmarks", source(cell))
    ]


def test_links_lead_to_files(path, prose):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", prose)
    assert not [link for link in links if not (path.parent / link).is_file()]


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
