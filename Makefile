# Every target makes .venv when it is missing; the second time is quick.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_DISABLE_TELEMETRY := 1
# Where the machine says not to write byte code, every process would compile torch and the rest anew: 20 s instead of 6.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all check bench clean

# torch comes first and pinned: asked for by a range, pip would take the registry's CUDA build. Byte code is compiled on
# first import instead of for every file that is installed.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[demo]'
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/python -m pipelines.distill --config configs/demo.yaml --output runs/demo --wandb offline

test: .venv/ready-dev
	$(BIN)/python -m pytest

test-all: .venv/ready-dev
	$(BIN)/python -m pytest -m ''

check: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready-dev
	$(BIN)/python -m benchmarks.training_step
	$(BIN)/python -m benchmarks.cache_speed

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache
