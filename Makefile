# make lab | test | test-all | test-gpu | tour | notebooks | workshop | slides | book | wheelhouse | lint | clean
#   PYTHON=python3.12    which Python makes .venv (3.11 or newer)
#   TORCH="torch==..."   what pip is given for torch, instead of the choice below
#   WHEELS=wheelhouse    install from this folder alone, without a network; `make wheelhouse` fills it
#   ARGS="..."           arguments for dtlib lab
#   TRACK=half-day       which short track `workshop` writes, two-hours unless told

PYTHON ?= python3
ARGS ?=
TRACK ?= two-hours
BIN := .venv/bin
TORCH_PIN := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
WHEELS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCE := $(if $(WHEELS),--no-index --find-links "$(abspath $(WHEELS))")

.PHONY: lab test test-slow test-gpu test-all tour notebooks workshop slides book wheelhouse lint clean

lab: .venv/ready
	$(BIN)/dtlib lab $(ARGS)

test: .venv/ready
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

test-gpu: .venv/ready
	$(BIN)/python -m pytest -m gpu

test-all: test test-slow

tour: .venv/ready
	$(BIN)/dtlib tour

notebooks: .venv/ready
	$(BIN)/python -m dtlib.lab.build

workshop: .venv/ready
	$(BIN)/python -m dtlib.lab.build $(TRACK)

slides: .venv/ready
	$(BIN)/python -m docs.slides

book: .venv/ready
	@$(BIN)/python -c 'import myst_nb' 2>/dev/null || $(PIP) install $(SOURCE) -e '.[book]'
	$(BIN)/python -m docs.book

# For this kind of machine and this Python; torch in the build that .venv has. setuptools builds dtlib itself.
wheelhouse: slides
	@torch=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))'); \
	case $$torch in *+cpu) $(PIP) wheel --wheel-dir wheelhouse --no-deps --index-url $(CPU_INDEX) "torch==$$torch";; esac && \
	$(PIP) wheel --wheel-dir wheelhouse --find-links wheelhouse "torch==$$torch" 'setuptools>=77' '.[test]'
	@echo "All wheels, dtlib's own with its slides too, are in wheelhouse: make lab WHEELS=wheelhouse needs no network."

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv

# Set-up happens once; .venv/ready is newer than the pins once it has succeeded.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dtlib needs Python 3.11 or newer, and $(PYTHON) is older or missing: make PYTHON=python3.12 lab"; exit 2; }
	$(PYTHON) -m venv .venv
	@set -e; \
	if [ -n "$(WHEELS)" ]; then \
	  choice="$(TORCH_PIN)"; echo "torch: the build in $(WHEELS)"; \
	elif [ -n "$(TORCH)" ]; then \
	  choice="$(TORCH)"; echo "torch: $(TORCH), as TORCH= asks"; \
	elif nvidia-smi -L >/dev/null 2>&1; then \
	  choice="$(TORCH_PIN)"; echo "torch: the default build, as there is an NVIDIA driver"; \
	elif $(BIN)/python -c 'import signal, sys, urllib.request; signal.alarm(3); urllib.request.urlopen(sys.argv[1])' \
	    "$(CPU_INDEX)/torch/" >/dev/null 2>&1; then \
	  choice="$(TORCH_PIN) --index-url $(CPU_INDEX)"; echo "torch: the CPU build from $(CPU_INDEX), as there is no NVIDIA driver"; \
	else \
	  choice="$(TORCH_PIN)"; \
	  echo "torch: no NVIDIA driver, but $(CPU_INDEX) does not answer within 3 s: taking the default index's build"; \
	fi; \
	echo "Installing the pinned packages into .venv; the first time this takes minutes."; \
	$(PIP) install $(SOURCE) $$choice
	$(PIP) install $(SOURCE) -e '.[test]'
	@touch .venv/ready
