# make lab | test | test-all | test-nightly | test-gpu | gpu-report | tour | notebooks | workshop | slides | book | browser | wheelhouse | lint | lock | clean
#   PYTHON=python3.12    which Python makes .venv (3.11 or newer)
#   TORCH="torch==..."   what pip is given for torch, instead of the choice below
#   WHEELS=wheelhouse    install from this folder alone, without a network; `make wheelhouse` fills it
#   JOBS=2               processes that run tests; as many as there are cores unless told, 2 to 4
#   ARGS="..."           arguments for dtlib lab and JupyterLab, such as ARGS="--no-browser --port=8890"
#   TRACK=half-day       which short track `workshop` builds again (for maintainers), two-hours unless told

PYTHON ?= python3
ARGS ?=
TRACK ?= two-hours
BIN := .venv/bin
TORCH_PIN := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.lock)
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
WHEELS ?=
UV_PIN := uv==0.13.9
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCE := $(if $(WHEELS),--no-index --find-links "$(abspath $(WHEELS))")

.PHONY: lab lock test test-slow test-nightly test-gpu gpu-report test-all tour notebooks workshop slides book browser wheelhouse lint clean

# Tests start hundreds of processes. Each would compile dtlib anew where the environment says that this is not kept.
test test-slow test-nightly test-gpu: export PYTHONDONTWRITEBYTECODE :=

JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(4, max(2, os.cpu_count() or 1)))')
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lab: .venv/ready
	@$(BIN)/python -m compileall -q dtlib
	$(BIN)/dtlib lab $(ARGS)

test: .venv/tests
	$(PYTEST) -m "not slow and not nightly and not lint"

test-slow: .venv/tests
	$(PYTEST) -m "slow and not nightly"

test-nightly: .venv/tests
	PATH="$$PATH:/usr/sbin:/sbin" $(BIN)/python -m pytest -p tests.groups -m nightly

test-gpu: .venv/tests
	$(BIN)/python -m pytest -m gpu

test-all: test test-slow

# By the Python that PYTHON= names, else by that of .venv, else by the system's; nothing is installed.
gpu-report:
	@$(if $(filter environment command,$(firstword $(origin PYTHON))),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON))) \
	  -m benchmarks.gpu_report

tour: .venv/ready
	$(BIN)/dtlib tour

notebooks: .venv/ready
	$(BIN)/python -m tools.notebooks

workshop: .venv/ready
	$(BIN)/python -m tools.notebooks $(TRACK)

slides: .venv/ready
	$(BIN)/python -m tools.slides

book: .venv/ready
	@$(BIN)/python -c 'import myst_nb' 2>/dev/null || $(PIP) install $(SOURCE) --constraint requirements.lock $(EDITABLE) -e '.[book]'
	$(BIN)/python -m tools.book

# The rooms that need no ranks, as a web page: a folder, and one file. npm fetches Python for browsers.
browser: .venv/ready
	$(BIN)/dtlib browser build/browser

# For this kind of machine and this Python; torch in the build that .venv has. setuptools builds dtlib itself.
wheelhouse: slides
	@torch=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))'); \
	case $$torch in *+cpu) $(PIP) wheel --wheel-dir wheelhouse --no-deps --index-url $(CPU_INDEX) "torch==$$torch";; esac && \
	$(PIP) wheel --wheel-dir wheelhouse --find-links wheelhouse --constraint requirements.lock "torch==$$torch" 'setuptools>=77' '.[test]'
	@echo "All wheels, dtlib's own with its slides too, are in wheelhouse: make lab WHEELS=wheelhouse needs no network."

lint: .venv/tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.prose
	$(BIN)/python -m pytest -q -m lint $$(grep -l mark.lint tests/test_*.py)

# The lock: every version that `make lab` installs, for all systems. Run it after a change of pyproject.toml; UPGRADE=1
# takes the newest of everything.
lock: .venv/ready
	$(PIP) --quiet install $(UV_PIN)
	$(BIN)/python -m uv --quiet pip compile --universal --python-version 3.11 --no-annotate $(if $(UPGRADE),--upgrade) \
	  --custom-compile-command 'make lock' --extra test --extra browser --extra book --extra hub --extra triton \
	  pyproject.toml -o requirements.lock

clean:
	rm -rf .venv

# Set-up happens once; .venv/ready is newer than the lock once it has succeeded. uv installs several times faster than
# pip, which brings it; where it cannot be had, or does not reach what pip is told of (a mirror in pip.conf), pip goes on.
# What only tests need is installed by the first `make test`.
UV := $(BIN)/python -m uv --quiet pip install --python $(BIN)/python
LOCKED := --constraint requirements.lock
# By a path, and not by a finder: to a script beside the clone, the clone's folder would be a package named dtlib.
EDITABLE := --config-settings editable_mode=compat
install = { [ -z "$(WHEELS)" ] && $(UV) $(LOCKED) $(1) 2>/dev/null; } || $(PIP) --quiet install $(SOURCE) $(LOCKED) $(1)

# Python keeps what it compiles here whatever the environment says: each kernel and rank would compile torch again.
FIRST_IMPORT := from importlib import import_module as load; import ipykernel.debugger; \
  import jupyterlab.labapp, matplotlib.pyplot, dtlib.lab; \
  from dtlib.world.zygote import IMPORTS, LATE_IMPORTS; list(map(load, (*IMPORTS, *LATE_IMPORTS)))

.venv/ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dtlib needs Python 3.11 or newer, and $(PYTHON) is older or missing: make PYTHON=python3.12 lab"; exit 2; }
	@echo "1 of 4  an environment of its own, in .venv"
	@$(PYTHON) -m venv .venv
	@set -e; \
	if [ -n "$(WHEELS)" ]; then \
	  choice="$(TORCH_PIN)"; why="the build in $(WHEELS)"; \
	elif [ -n "$(TORCH)" ]; then \
	  choice="$(TORCH)"; why="$(TORCH), as TORCH= asks"; \
	elif nvidia-smi -L >/dev/null 2>&1; then \
	  choice="$(TORCH_PIN)"; why="the default build, as there is an NVIDIA driver"; \
	elif $(BIN)/python -c 'import signal, sys, urllib.request; signal.alarm(3); urllib.request.urlopen(sys.argv[1])' \
	    "$(CPU_INDEX)/torch/" >/dev/null 2>&1; then \
	  choice="$(TORCH_PIN) --index-url $(CPU_INDEX)"; why="the CPU build from $(CPU_INDEX), as there is no NVIDIA driver"; \
	else \
	  choice="$(TORCH_PIN)"; \
	  why="the default index's build: no NVIDIA driver, but $(CPU_INDEX) does not answer within 3 s"; \
	fi; \
	echo "2 of 4  torch, the largest: $$why"; \
	$(PIP) --quiet install --no-compile $(SOURCE) $$choice
	@echo "3 of 4  the other packages; the first time 2 and 3 take a minute or more, most of it download"
	@[ -n "$(WHEELS)" ] || $(PIP) --quiet install $(UV_PIN) || true
	@$(call install,$(EDITABLE) -e .)
	@echo "4 of 4  a first import, which compiles what notebooks and ranks load"
	@PYDEVD_DISABLE_FILE_VALIDATION=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -c '$(FIRST_IMPORT)'
	@$(BIN)/python -m compileall -q dtlib
	@touch .venv/ready

.venv/tests: .venv/ready
	@echo "What only tests need"
	@$(call install,$(EDITABLE) -e '.[test]')
	@touch .venv/tests
