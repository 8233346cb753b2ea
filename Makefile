# Every target makes .venv when it is missing; the second time is quick.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_DISABLE_TELEMETRY := 1
# Where the machine says not to write byte code, every process would compile torch and the rest anew: 20 s instead of 6.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo quick test test-all test-less check docs bench clean

# torch comes first and pinned, from TORCH_INDEX if that is set: PyPI's build for Linux brings CUDA, and
# `make TORCH_INDEX=https://download.pytorch.org/whl/cpu demo` spares several GB without a GPU. Byte code is compiled on
# first import instead of for every file that is installed.
TORCH_INDEX ?=
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[demo]'
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

# The libraries that benchmarks compare with, which only the tests of benchmarks need.
.venv/ready-bench: .venv/ready-dev
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[bench]'
	touch $@

demo: .venv/ready
	$(BIN)/python -m pipelines.distill --config configs/demo.yaml --output runs/demo --wandb offline

# What changed since the last commit: lint, types, the unit tests of the packages in question.
quick: .venv/ready-dev
	$(BIN)/python tools/quick.py

test: .venv/ready-dev
	$(BIN)/python -m pytest

test-all: .venv/ready-bench
	$(BIN)/python -m pytest -m ''
	$(MAKE) test-less

# Tests of numbers once more with fewer instruction sets than the machine has. torch, oneDNN, MKL, FBGEMM, OpenBLAS and
# Arrow have switches for it; ONNX Runtime, OpenVINO and XNNPACK have none: what becomes of int8 without VNNI is tried in
# qemu-user where that is installed (`apt-get install qemu-user`), by the slow tests of test_processors.
# OpenVINO and torchao are left out: on a processor with VNNI their int8 products with a limited oneDNN are a mixture that
# no processor has (torch still chooses oneDNN for them, whose kernels then saturate; OpenVINO may crash).
# `make test-less ISA=default ONEDNN=SSE41` takes away AVX2 too.
ISA := avx2
ONEDNN := AVX2
LESS := ATEN_CPU_CAPABILITY=$(ISA) ONEDNN_MAX_CPU_ISA=$(ONEDNN) MKL_ENABLE_INSTRUCTIONS=$(ONEDNN) \
	FBGEMM_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell ARROW_USER_SIMD_LEVEL=AVX2
NUMBERS := quantized_export export export_verification quantize sensitivity float8 grid packing embedding_rank sentence_embedding losses \
	fused_losses sparse_losses cross_tokenizer matching layer_terms padding signals cached_features processors

test-less: .venv/ready-dev
	$(LESS) $(BIN)/python -m pytest -m '' -k 'not openvino and not torchao' $(foreach name,$(NUMBERS),$(or $(shell find tests -name test_$(name).py),$(error no test_$(name).py)))

check: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/settings_reference.py --check
	$(BIN)/python tools/architecture.py --check
	$(SITE)

# Broken links, anchors and images, and pages that no menu names, are errors.
SITE := $(BIN)/python -m sphinx --builder html --fresh-env --fail-on-warning --keep-going --quiet docs build/docs

# Writes the pages that are generated from the code, and builds the site.
docs: .venv/ready-dev
	$(BIN)/python tools/settings_reference.py
	$(BIN)/python tools/architecture.py
	$(SITE)
	@echo "build/docs/index.html"

bench: .venv/ready-dev
	$(BIN)/python -m benchmarks.training.training_step
	$(BIN)/python -m benchmarks.cache.speed

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache
