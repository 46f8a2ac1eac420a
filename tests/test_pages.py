"""The pages: their links lead somewhere, and their tables are the committed results."""

import json
import re

import acting
import breakage_map
import law
import matplotlib.pyplot as plt
import pytest
import results
from matplotlib.figure import Figure
from results import Journal

from fp8rl.study.statistics import fails


def test_every_table_in_results_is_on_a_page_or_linked_from_one():
    text = "".join(page.read_text() for page in results.READMES)
    for path in results.RESULTS.rglob("*.md"):
        assert f"results/{path.relative_to(results.RESULTS).as_posix()}" in text, path
        table = path.read_text()
        assert "commit " in table, path
        scripts = re.findall(r"`python (benchmarks/\S+\.py)", table)
        assert any((results.ROOT / script).exists() for script in scripts) or not scripts, path


def test_the_pages_have_a_section_for_every_table():
    shown = []
    for page in results.PAGES:
        text = page.read_text()
        sections = re.findall(r"(?m)^## (\w+)$", text)
        assert re.findall(r"(?m)^\| .* \| \[(\w+)\]\(#\1\) \|$", text) == sections, page
        shown += sections
    steps = re.compile("_(first|predicted|measured)$")
    names = {steps.sub("", name) for name in results.COMMANDS}
    # Their scripts are kept only in the commits that they name
    old = [path for path in results.RESULTS.glob("*.md") if "Made at commit" in path.read_text()]
    assert names <= {*shown} <= names | {path.stem for path in old}


@pytest.mark.parametrize(
    ("module", "name"), [(acting, "acting"), (acting, "stack_rules"), (law, "rates")]
)
def test_the_committed_tables_follow_from_the_committed_measurements(
    module, name, tmp_path, monkeypatch
):
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: plt.close(figure))
    module.main(["table", str(tmp_path / f"{name}.md")])
    for path in tmp_path.iterdir():
        *committed, _ = (results.RESULTS / path.name).read_text().splitlines()
        *made, last = path.read_text().splitlines()
        assert made == committed and last.startswith("`python ")


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "fp8rl/bits/README.md",
    "fp8rl/doctor/README.md",
    "fp8rl/dumps/README.md",
    "findings/README.md",
    *(str(path.relative_to(results.ROOT)) for path in results.ROOT.glob("docs/*.md")),
    *(str(page.relative_to(results.ROOT)) for page in results.READMES[1:]),
    *(str(path.relative_to(results.ROOT)) for path in results.ROOT.glob("notebooks/*.ipynb")),
]


def anchors_of(text: str) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", text))
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("name", PAGES)
def test_links_of_pages_lead_somewhere(name):
    path = results.ROOT / name
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "markdown")
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        target = path.parent / file if file else path
        assert target.exists(), (file, anchor)
        assert not anchor or anchor in anchors_of(target.read_text()), (file, anchor)


def test_the_committed_verdicts_follow_from_the_numbers_beside_them():
    rows = Journal(results.RESULTS / "breakage_map.csv", breakage_map.COLUMNS).rows()
    medians = {(row["task"], row["place"], row["format"]): float(row["median"]) for row in rows}
    for row in rows:
        places = (row["place"], row["format"]), breakage_map.BASELINE, breakage_map.UNTRAINED
        sign = -1 if row["task"] == breakage_map.LQR else 1
        numbers = (sign * medians[(row["task"], *place)] for place in places)
        assert (row["verdict"] == "fails") == fails(*numbers), row
