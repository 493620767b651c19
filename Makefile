# Every target runs a command of the package, after installing it into .venv.
PYTHON ?= python3
JOBS   ?= auto
BIN    := .venv/bin
READY  := .venv/.ready
# Where bytecode is not kept, every process compiles torch again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST  = OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest -n $(JOBS) --max-worker-restart=0

# Runs one command, prints how long it took, and passes its exit status on.
timed = @start=$$(date +%s); $(1); status=$$?; echo "make $@: $$(($$(date +%s) - start)) s in total"; exit $$status

CHECKED := $(addprefix tests/test_,sync.py lines.py notebook_shape.py imports.py core.py hypernetwork.py routing.py hmoe.py \
           selection.py setup.py warm_kernels.py) tests/test_cli.py::test_train_prints_what_was_selected_and_keeps_a_record

.PHONY: help reproduce test test-slow check figures notebooks book report archive clean
help:
	@echo "make reproduce   train a sample of the published runs again, render all published pages, compare both"
	@echo "make test        run the fast tests"
	@echo "make test-slow   run the slow tests: all notebooks, rendering, sweeps, killed runs, the book"
	@echo "make check       the checks of a commit (lint, format, export, spelling, types) and a minute of tests"
	@echo "make figures     render every published profile from the committed records, and the README"
	@echo "make notebooks   export the library, execute the library notebooks and store their outputs"
	@echo "make book        build the notebooks as an offline site: build/book/html"
	@echo "make report      compute the numbers of the reproduction report from the records and build docs/report/*.pdf"
	@echo "make archive     pack results/, what pages read, and the data card, with checksums: build/*.tar.gz"
	@echo "make clean       remove .venv, runs and caches; nothing that git tracks"

reproduce: $(READY)
	$(call timed,$(BIN)/hmoe reproduce)

test: $(READY)
	$(call timed,$(PYTEST) -m "not slow")

test-slow: .venv/.extras
	$(call timed,$(PYTEST) -m slow)

check: .venv/.check
	$(call timed,$(BIN)/python .ci/checks.py && $(PYTEST) -q -m "not slow" $(CHECKED))

figures: $(READY)
	$(call timed,$(foreach profile,quick mnist pacs paper,$(BIN)/hmoe figures --profile $(profile) &&) \
	  $(BIN)/hmoe figures --profile bench)

notebooks: $(READY)
	$(call timed,$(BIN)/python .ci/notebooks.py)

# Sphinx, ONNX and the loggers are installed for the book and the slow tests only. The stamp marks their install; a new .venv has none.
book: .venv/.extras
	$(call timed,$(BIN)/python docs/book/build.py)

report: .venv/.report
	$(call timed,$(BIN)/python docs/report/build_report.py)

# Needs nothing but Python.
archive:
	@$(PYTHON) .ci/archive.py

.venv/.extras: $(READY)
	@echo "Installing what the book and the slow tests need into .venv"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[book,export,loggers]'
	@touch $@

.venv/.report: $(READY)
	@echo "Installing Typst into .venv"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[report]'
	@touch $@

.venv/.check: $(READY)
	@echo "Installing the type checker, the spelling checker and pre-commit into .venv"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[check]'
	@touch $@

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache _proc _docs
	find .ci hmoe_repro nbs tests \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# Python compiles a module when it is first imported; compiling all would be half of the install.
# The stamp is written last and names this folder: an interrupted install, or a copy of the folder, starts again.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif
$(READY): pyproject.toml constraints.txt
	@echo "Installing pinned versions into .venv (a few minutes, once)"
	@test "$$(cat $@ 2>/dev/null)" = "$(CURDIR)" || $(PYTHON) -m venv --clear .venv
	@rm -f $@
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@echo "$(CURDIR)" > $@
