"""The notebooks with other parameters, in another folder: smaller than anyone would choose, so that
every study is tiny. They run in this process, because starting kernels and workers takes longer
than what these do; with their own parameters they run in kernels (--nbmake)."""

import re
import resource
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SMALL = {
    "fp8_actor_critic": {"SEED": 7, "STEPS": 10_240, "PRECISION": "fp16", "STUDY_SEEDS": 1},
    "replay_memory": {"SEED": 7, "SEEDS": 1, "CODEC_STEPS": 600, "LONG_RUN_STEPS": 40_960},
    "devices_and_graphs": {"SEED": 7, "STEPS": 2_048},
    "other_tasks": {"SEED": 7, "SEEDS": 1, "STEPS": 10_240, "LEARNING_RATE": 1e-3},
    "how_few_bits": {"SEED": 7, "SEEDS": 1, "STEPS": 5_120},
    "acting_in_few_bits": {"SEED": 7, "SEEDS": 1, "LENGTH": 8, "UPDATES": 20},
}
SENSELESS = {
    "fp8_actor_critic": {"STEPS": 10_239, "PRECISION": "fp7", "STUDY_SEEDS": 0},
    "replay_memory": {"SEEDS": 0, "CODEC_STEPS": 511, "LONG_RUN_STEPS": 40_959},
    "devices_and_graphs": {"STEPS": 2_047},
    "other_tasks": {"SEEDS": 0, "STEPS": 10_239},
    "how_few_bits": {"SEEDS": 0, "STEPS": 5_119},
    "acting_in_few_bits": {"SEEDS": 0, "LENGTH": 7, "UPDATES": 19},
}


def with_parameters(name: str, **values):
    """A notebook with a value for each of its parameters, some of them new, and the index of their
    cell."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (at,) = [
        i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])
    ]
    names = {line.split(" = ")[0] for line in notebook.cells[at].source.splitlines()}
    assert values.keys() <= names == SMALL[name].keys()
    notebook.cells[at].source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
    return notebook, at


def run_cell(shell: InteractiveShell, cell) -> list[str]:
    """What the cell shows. An exercise must fail, in an assertion of one line, until it is
    solved."""
    with capture_output() as captured:
        result = shell.run_cell(cell.source)
    if "raises-exception" in cell.metadata.get("tags", []):
        assert isinstance(result.error_in_exec, AssertionError) and re.fullmatch(
            "[^\n]+", str(result.error_in_exec)
        )
        return []
    result.raise_error()
    return [captured.stdout, captured.stderr, *(str(output.data) for output in captured.outputs)]


# The others take as long in small, because what they compare is compared in any size.
@pytest.mark.parametrize("name", ["acting_in_few_bits", "fp8_actor_critic", "replay_memory"])
@pytest.mark.filterwarnings("ignore:.*non-interactive, and thus cannot be shown")
# When its cell runs again
@pytest.mark.filterwarnings("ignore:.*Overriding environment CustomEnv-v0")
def test_runs_with_other_parameters_in_another_folder(
    name, tmp_path_factory, tmp_path, monkeypatch, one_process
):
    notebook, _ = with_parameters(name, **SMALL[name])
    plt.switch_backend("Agg")  # or a desktop's would open windows
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell replaces it
    limits, shown = resource.getrlimit(resource.RLIMIT_DATA), []
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    try:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                began = time.perf_counter()
                shown += run_cell(shell, cell)
                # Again, as a reader may, unless that takes long
                if time.perf_counter() - began < 0.5:
                    shown += run_cell(shell, cell)
    finally:
        shell.reset(new_session=False)
        InteractiveShell.clear_instance()
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        plt.close("all")
    assert not list(tmp_path.iterdir())  # it leaves nothing behind
    assert any(shown) and str(tmp_path) not in "".join(shown)


@pytest.mark.parametrize("name", SENSELESS)
def test_senseless_parameters_are_named_in_one_line(name):
    """In the cell after the parameters, which needs no kernel."""
    for parameter, value in SENSELESS[name].items():
        notebook, at = with_parameters(name, **{parameter: value})
        with pytest.raises(AssertionError, match=f"^{parameter} is {value}: [^\n]+$"):
            exec("\n".join(cell.source for cell in notebook.cells[at : at + 2]), {})
