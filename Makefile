# Two commands do everything on a fresh machine:  make demo  and  make test.  They need python3 (3.11 or newer) and nothing else.
# On Linux, PyPI's torch brings 5 GB of CUDA libraries. TORCH=cpu takes PyTorch's build for CPUs instead:  make demo TORCH=cpu

PYTHON ?= python3
PROGRAMS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
VENVS := .venv .venv-lowest .venv-smoke .venv-newest .venv-trl .venv-ray .venv-clients .venv-real
BIN := .venv/$(PROGRAMS)
LOWEST := .venv-lowest/$(PROGRAMS)
SMOKE := .venv-smoke/$(PROGRAMS)
NEWEST := .venv-newest/$(PROGRAMS)
TRL := .venv-trl/$(PROGRAMS)
RAY := .venv-ray/$(PROGRAMS)
CLIENTS := .venv-clients/$(PROGRAMS)
REAL := .venv-real/$(PROGRAMS)
CONSTRAINTS := constraints.txt
PIP_INSTALL = -m pip install --disable-pip-version-check -c $(CONSTRAINTS)
RUFF = $(BIN)/ruff check . && $(BIN)/ruff format --check .
LINT = $(RUFF) && $(BIN)/mypy
CPU_INDEX := https://download.pytorch.org/whl/cpu

# With PYTHON=..., an environment of another version of Python is made anew.
version_of = $(shell $(1) -c "import platform; print(platform.python_version())" 2> /dev/null)
is_other = $(and $(filter-out file,$(origin PYTHON)),$(filter-out $(call version_of,$(PYTHON)),$(call version_of,$(1)/$(PROGRAMS)/python)))
OTHERS := $(foreach venv,$(VENVS),$(if $(call is_other,$(venv)),$(venv)/installed))

.PHONY: demo one-file test check test-long test-lowest smoke-lowest test-newest test-trl test-ray test-clients test-real coverage golden sanitize lint notebooks docs wheel gpu clean $(OTHERS)

demo: .venv/installed
	$(BIN)/nanoinfer generate "Once upon a time" --echo --seed 1
	@printf '%s\n' "" "It works. Next:" \
		"  source $(BIN)/activate" \
		"  nanoinfer chat                        # talk to the bundled model" \
		"  nanoinfer explain --demo preemption   # replay every step of a generation in a browser" \
		"  nanoinfer generate -m Qwen/Qwen3-0.6B \"What is a KV cache?\" --chat   # downloads 1.5 GB once" \
		"README.md says where to begin."

# The engine in one file, from the package's source. A test fails while the file is older than the source.
one-file: .venv/installed-test
	$(BIN)/python -m nanoinfer_course.learn.export one_file/engine.py
	$(BIN)/python docs/one_file.py

# The lint runs beside the tests, and says at the end what it found. python -m tests.seconds shows where the time went.
test: .venv/installed-test
	@echo "make test takes 9 minutes on two cores that do nothing else. make check is its quick part."
	@($(LINT)) > .lint.log 2>&1 & lint=$$!; \
		$(BIN)/python -m pytest -n auto --dist worksteal --durations=50 --junitxml=build/tests.xml; tests=$$?; \
		wait $$lint; linted=$$?; cat .lint.log; exit $$((tests || linted))

# For a change, before make test: 90 seconds on two cores.
check: .venv/installed-test
	$(RUFF)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

# The tests that take minutes, and all notebooks and examples, at night in .github/workflows/verify.yml: TESTS names some of them.
test-long: .venv/installed-test
	$(BIN)/python -m pytest -n auto --dist worksteal -m long $(TESTS)

# The tests with the oldest dependencies that the extra test allows. Triton 3.6's interpreter warns with numpy 1.25 and newer.
test-lowest: .venv-lowest/installed-test
	$(LOWEST)/python -m pytest -n auto --dist worksteal -W "ignore:Conversion of an array with ndim:DeprecationWarning"

# Texts, chats, a server and commands with the oldest dependencies that pyproject.toml allows to run, which are older than those to
# test. MODELS="FOLDER FILE.gguf" names more models.
smoke-lowest: .venv-smoke/installed
	$(SMOKE)/python $(PIP_INSTALL) -e ".[server,structured]" pytest
	HF_HUB_OFFLINE=1 MODELS="$(MODELS)" $(SMOKE)/python -m pytest --noconftest -W default tests/oldest.py

# The tests with the newest versions of all dependencies.
test-newest: .venv-newest/installed-test
	$(NEWEST)/python -m pytest -n auto --dist worksteal

# The example with TRL, which is skipped elsewhere. examples/trl_grpo.py names the version.
test-trl: .venv-trl/installed-test
	$(TRL)/python $(PIP_INSTALL) trl==1.16.0
	$(TRL)/python -m pytest tests/end_to_end/test_examples.py -k trl

# The tests with Ray, which are skipped elsewhere, one after the other: each starts Ray's own processes.
test-ray: .venv-ray/installed-test
	$(RAY)/python $(PIP_INSTALL) -e ".[ray-serve]" "ray[data]"
	$(RAY)/python -m pytest tests/server/test_ray_batch.py tests/server/test_ray_serve.py
	$(RAY)/python -m pytest tests/end_to_end/test_examples.py -k ray

# The tests with Anthropic's client and OpenAI's agents SDK, of which the newest versions are taken. They are skipped elsewhere.
test-clients: .venv-clients/installed-test
	$(CLIENTS)/python $(PIP_INSTALL) --upgrade anthropic openai openai-agents
	$(CLIENTS)/python -m pytest tests/server/test_messages.py tests/server/test_responses.py

# Published weights and tokenizers, which are downloaded into build/real: 250 MB, once. What no registry has is skipped, and the rest
# runs. Where CI is set, nothing may be skipped. (A recipe that names $(MAKE) would also run under `make -n`.)
THIS_MAKE := $(MAKE)
test-real:
	@if $(THIS_MAKE) --no-print-directory .venv-real/installed-test; then $(REAL)/python -m pytest tests/real -rs; \
		else echo "make test-real is skipped: its environment, .venv-real, cannot be installed."; test -z "$$CI"; fi

# Which lines and branches of the packages the tests run, in pytest's own processes. It fails below the minimum in pyproject.toml. From
# Python 3.14 on, branches are measured by sys.monitoring, which takes little time.
coverage: .venv/installed-test
	$(BIN)/python $(PIP_INSTALL) pytest-cov==7.0.0 coverage==7.11.1
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term

# What the scheduler plans and what the models compute, compared with a commit on this machine: 4 minutes. BASE is the commit that
# tests/golden/plans.txt names, unless it is given:  make golden BASE=HEAD~1
golden: .venv/installed-test
	$(BIN)/python -m tests.golden compare $(if $(BASE),--base $(BASE))

# The tests that call the C++ kernels from Python, with the kernels under AddressSanitizer and UndefinedBehaviorSanitizer, whose
# libraries must be loaded before Python's. g++ is needed. Python does not free all of its memory, so leaks are not reported. g++ 12
# reports that load (vectors.h) writes its own variable after its scope, so scopes are left out.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize-address-use-after-scope
SANITIZED_TESTS := tests/fast/cpu tests/fast/sampling/test_kernels.py tests/attention/test_cpu.py
SANITIZED_TESTS += tests/features/distributed/test_shared_memory.py
sanitize: .venv/installed-test
	LD_PRELOAD="$(foreach library,asan ubsan stdc++,$(shell g++ -print-file-name=lib$(library).so))" ASAN_OPTIONS=detect_leaks=0 \
		CXX="g++ $(SANITIZERS)" $(BIN)/python -m pytest $(SANITIZED_TESTS)

lint: .venv/installed-test
	$(LINT)

# Run every notebook and solution anew and keep their output. The figures in it are then this machine's.
notebooks: .venv/installed-test
	$(BIN)/python notebooks/run.py

# The documentation site, in build/site, which fetches nothing from elsewhere. To read it: python -m http.server -d build/site
# The warning that is switched off announces the end of the theme. docs/contributing.md says what follows from it.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# A wheel with compiled kernels, in dist/, for x86-64 Linux. g++ or $CXX compiles them: 6 minutes on a core.
wheel: .venv/installed
	rm -rf build/libraries
	$(BIN)/python -m tools.libraries build/libraries
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

# On a machine with a CUDA device, with the Python at hand. Installs nothing. Takes 10 minutes, prints a block for BENCHMARKS.md, and
# adds it there. Only some parts:  python -m benchmarks.device --parts steps,latency
gpu:
	$(PYTHON) -m benchmarks.device --block BENCHMARKS.md

clean:
	rm -rf $(VENVS)

# The stamps make a second run start at once. A change of the requirements installs again.
.venv-lowest/%: CONSTRAINTS := constraints-lowest.txt
.venv-smoke/% smoke-lowest: CONSTRAINTS := constraints-smoke.txt
.venv-newest/%: CONSTRAINTS := /dev/null

$(VENVS:=/installed): %/installed: pyproject.toml constraints.txt constraints-lowest.txt constraints-smoke.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@test "$$(uname)$(TORCH)" != Linux || command -v nvidia-smi > /dev/null || \
		echo "On Linux, PyPI's torch brings 5 GB of CUDA libraries. TORCH=cpu takes PyTorch's build for CPUs: make demo TORCH=cpu"
	$(if $(call is_other,$*),$(PYTHON) -m venv --clear $*,test -x $*/$(PROGRAMS)/python || $(PYTHON) -m venv $*)
	$(if $(filter cpu,$(TORCH)),$*/$(PROGRAMS)/python $(PIP_INSTALL) --no-deps --retries 1 --timeout 15 --index-url $(CPU_INDEX) torch || \
		echo "torch could not be taken from $(CPU_INDEX). The usual index follows: on Linux its torch brings CUDA libraries.")
	$*/$(PROGRAMS)/python $(PIP_INSTALL) -e .
	touch $@

$(VENVS:=/installed-test): %/installed-test: %/installed
	$*/$(PROGRAMS)/python $(PIP_INSTALL) -e ".[test]"
	touch $@

.venv/installed-docs: %/installed-docs: %/installed
	$*/$(PROGRAMS)/python $(PIP_INSTALL) -e ".[docs]"
	touch $@
