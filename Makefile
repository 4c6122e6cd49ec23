# Two commands from nothing, given Python 3.11 to 3.14 and make: `make lab` and `make test`.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
LOCK := .ci/constraints.txt
UV := uv==0.13.9
TORCH := $(shell sed -n 's/^ *"torch==\([^"]*\)".*/\1/p' pyproject.toml)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The stamp carries a checksum of what was installed: changed pins install again, nothing else does.
STAMP := $(VENV)/.ready-$(shell cat pyproject.toml $(LOCK) | cksum | cut -d' ' -f1)
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root)
CONTRACTS := $(wildcard $(addprefix tests/test_,setup.py notebooks.py contract*.py prose*.py))

# One thread and a fixed hash seed: printed floats and set order are the same on every run.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export PYTHONHASHSEED ?= 0

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

lab: $(STAMP) ## set up what is missing and open JupyterLab on the course (LABARGS=...)
	@$(BIN)/python -m course_lib.zoo.smollm2 || echo "NOTICE: SmolLM2 is missing (see above). The course opens without it; cells that load it will fail." >&2
	$(BIN)/jupyter lab $(ROOT_FLAG) --LabApp.default_url=/lab/tree/notebooks $(LABARGS)

test: model ## set up what is missing, then run every test and every notebook (PYTESTARGS=...)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope --nbval --nbval-current-env --nbval-cell-timeout 120 notebooks tests $(PYTESTARGS)

check: $(STAMP) ## lint, formatting, and the prose and contract tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q $(CONTRACTS) $(PYTESTARGS)

refresh: model ## rebuild and re-execute the notebooks, write what changed (NB=05_rope for one)
	$(BIN)/python -m tools.notebooks refresh --jobs $(JOBS) $(NB)

figures: refresh ## the same run: the notebooks write figures/*.svg and *.png, byte for byte alike

present: model ## one notebook on the wall: code hidden, widgets live (NB=16_end_to_end LABARGS=...)
	$(BIN)/python -m tools.present $(NB) $(LABARGS)

slides: $(STAMP) ## write an offline deck of each notebook to build/slides (NB=05_rope for one)
	$(BIN)/python -m tools.slides $(NB)

bench: model ## speed against transformers, litgpt and llama.cpp: benchmarks/RESULTS.md (SECTION=decode)
	@test -e $(VENV)-bench/.ready || $(MAKE) -s peers PEERS=bench
	@test -e $(VENV)-bench-litgpt/.ready || $(MAKE) -s peers PEERS=bench-litgpt || true
	$(VENV)-bench/bin/python -m benchmarks $(SECTION)

# An environment for each set of peers, on top of the course's own: torch is not installed again.
peers:
	$(BIN)/python -m venv $(VENV)-$(PEERS)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$($(VENV)-$(PEERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/course.pth
	$(VENV)-$(PEERS)/bin/python -m pip install -q $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(PEERS)"])')
	@touch $(VENV)-$(PEERS)/.ready

lock: $(STAMP) ## resolve the pins of pyproject.toml again into .ci/constraints.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" --extra test --extra browser pyproject.toml -o $(LOCK)

clean: ## remove the environment and caches (the user's model cache stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache *.egg-info build

model: $(STAMP)
	@$(BIN)/python -m course_lib.zoo.smollm2

$(STAMP):
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 15) or sys.exit(f"Python 3.11 to 3.14 is needed, and $(PYTHON) is {v[0]}.{v[1]}: name another one, for example make lab PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q $(UV) || echo "NOTICE: uv cannot be installed here, so pip does its work, more slowly." >&2
	@# Torch goes first and without dependencies: the next step then keeps this build and adds them.
	@$(BIN)/python -c 'import torch; assert torch.__version__.split("+")[0] == "$(TORCH)"' 2>/dev/null || $(MAKE) -s torch
	$(BIN)/uv pip install -q --python $(BIN)/python -c $(LOCK) -e '.[test,browser]' || $(BIN)/python -m pip install -q -c $(LOCK) -e '.[test,browser]'
	@rm -f $(VENV)/.ready-* && touch $@

# A CPU build: from a folder of wheels (PIP_FIND_LINKS), else from PyTorch's CPU index. Only then
# from PyPI, whose Linux build carries CUDA. An extra index in a requirement would be asked for
# every package, and where it cannot be reached each question costs seconds.
torch:
	@$(BIN)/python -m pip install -q --no-deps "torch==$(TORCH)+cpu" 2>/dev/null \
	|| $(BIN)/python -m pip install -q --no-deps --retries 1 --timeout 10 --index-url $(TORCH_INDEX) "torch==$(TORCH)" \
	|| { echo "NOTICE: $(TORCH_INDEX) cannot be reached, so torch comes from PyPI. On Linux that is the CUDA build, about 3 GB; stop now (Ctrl-C) if that is not wanted." >&2; \
	$(BIN)/python -m pip install --no-deps "torch==$(TORCH)"; }

.PHONY: help bench peers lab test check refresh figures present slides lock clean model torch
