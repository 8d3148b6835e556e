# Two commands do everything on a fresh machine:  make demo  and  make test.  They need python3 (3.11 or newer) and nothing else.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint notebooks gpu clean

demo: .venv/installed
	$(BIN)/nanoinfer generate "Once upon a time" --echo --seed 1

test: lint
	$(BIN)/python -m pytest -n auto

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Run every notebook anew and keep what it shows: the figures in it are this machine's then.
notebooks: .venv/installed-test
	$(BIN)/python notebooks/run.py

# On a machine with a CUDA device, with the Python at hand: installs nothing, and adds an entry to BENCHMARKS.md.
gpu:
	$(PYTHON) -m pytest tests/end_to_end/test_gpu.py tests/attention/test_triton.py tests/models/test_fused_kernels.py tests/execution/test_model_runner.py
	$(PYTHON) -m nanoinfer doctor
	$(PYTHON) -m nanoinfer bench report --shape qwen3-0.6b --device cuda --workload A,C,E,F > gpu-report.md || (rm gpu-report.md; exit 1)
	(echo; cat gpu-report.md) >> BENCHMARKS.md
	rm gpu-report.md

clean:
	rm -rf .venv

# The stamps make a second run ready at once; a change of the requirements installs again.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@
