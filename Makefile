# make demo       trains the agent in the notebook and leaves the executed notebook and its figures under build/
# make test       runs the tests, in random order, a process for each core
# make notebooks  runs the notebooks, a process for each core
# make script     writes notebooks/actor_critic.py, one file that runs alone, from the cells of the main notebook
# make lab        opens the notebooks in JupyterLab
# make lint       checks package, tests and notebooks
# make results    lists the commands that make the tables of benchmarks/; ONLY="study codecs" runs these
# make gpu        on a machine with an NVIDIA GPU: runs what tests need one, then makes the tables of benchmarks/pages/gpu.md again
# make address    puts a Colab badge for REPOSITORY into the README, and REPOSITORY into the first cell of each notebook, which installs from there
# The targets above set up .venv first; a second run finds it ready and starts at once.
PYTHON ?= python3
# How packages are installed. uv, where there is one that can, picks the torch for this machine's GPU, or the one for CPUs alone,
# which spares gigabytes of CUDA libraries. pip takes the one of the package index.
PIP := python -m pip install --quiet --disable-pip-version-check
UV := uv pip install --torch-backend=auto
INSTALL ?= $(if $(shell uv pip install --help 2>/dev/null | grep -e --torch-backend),$(UV),$(PIP))
READY := .venv/.ready
RUN := . .venv/bin/activate &&
NOTEBOOK := fp8_actor_critic
# The order of tests is drawn anew in each run, or from SEED
ORDER := $(if $(SEED),--randomly-seed=$(SEED))
# The project's public address on GitHub, as owner/name. It has none yet, so until then notebooks install from the clone they are in.
REPOSITORY ?=
BADGE := https://colab.research.google.com/assets/colab-badge.svg

.PHONY: demo test notebooks script lab lint results gpu address clean

demo: $(READY)
	@mkdir -p build
	$(RUN) jupyter nbconvert --to notebook --execute --output-dir build notebooks/$(NOTEBOOK).ipynb
	$(RUN) jupyter nbconvert --to markdown --output-dir build build/$(NOTEBOOK).ipynb
	@echo "Executed notebook: build/$(NOTEBOOK).ipynb"
	@echo "Its figures:       build/$(NOTEBOOK)_files/"

test: $(READY)
	$(RUN) pytest -n auto --dist loadgroup --durations 12 $(ORDER) tests

notebooks: $(READY)
	$(RUN) pytest -n auto --nbmake notebooks

script:
	$(PYTHON) notebooks/make_script.py

lab: $(READY)
	$(RUN) jupyter lab notebooks

lint: $(READY)
	$(RUN) ruff check && ruff format --check

results: $(READY)
	$(RUN) python benchmarks/results.py $(ONLY)

gpu: $(READY)
	@$(RUN) python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		{ echo "torch finds no CUDA device: run it where there is one, with a torch built for CUDA" >&2; exit 2; }
	$(RUN) pytest -m cuda tests
	$(RUN) python benchmarks/results.py fp8_layer placements populations_cuda widths_cuda

address:
	@test -n "$(REPOSITORY)" || { echo "REPOSITORY is empty: name it, as in make address REPOSITORY=owner/name" >&2; exit 2; }
	perl -pi -e 's{(%pip install --quiet )[^"\\]+}{$$1git+https://github.com/$(REPOSITORY)}' notebooks/*.ipynb
	perl -pi -e 's{^(<!-- colab: .*-->|\[!\[Open in Colab\].*)$$}{[![Open in Colab]($(BADGE))](https://colab.research.google.com/github/$(REPOSITORY)/blob/main/notebooks/$(NOTEBOOK).ipynb)}' README.md

clean:
	rm -rf .venv build

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "fp8rl needs Python 3.10 or newer and found $$($(PYTHON) --version 2>&1): name one, as in make demo PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "Python's venv module is missing: install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(RUN) $(INSTALL) -r requirements.txt
	@touch $(READY)
