# The commands of zensync. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
BIN := .venv/bin
DEMO_ARGS ?=
FUZZ_S ?= 60
MATRIX_ARGS ?=
VERSION ?=
CLAIMS_ARGS ?= --json bench/results/claims.json

.PHONY: help setup demo claims test test-all test-slow matrix test-torch ref asan-ubsan tsan fuzz format clang-tidy wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

setup:  ## system packages (as root), .venv, zensync in it; quick when nothing changed
	@scripts/setup.sh

demo: setup  ## trains on real text, dense, sparse and zensync side by side (DEMO_ARGS="--json FILE")
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/zensync demo $(DEMO_ARGS)

claims: setup  ## measures every stated figure again; fails if one falls short (CLAIMS_ARGS="--only NAME")
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/claims.py $(CLAIMS_ARGS)

test: setup  ## C++ and Python tests, types, style
	@scripts/test.sh

test-all: export ZENSYNC_TEST_FACTOR = 50
test-all: test test-slow ref asan-ubsan tsan  ## test with 10^6 property cases, slow links, no SIMD, sanitizers

test-slow: setup  ## Python tests of ten seconds or more (ranks and links that are silent)
	@$(BIN)/python -m pytest -m slow

ref: setup  ## C++ tests with the reference kernels only
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; \
	cmake --preset ref && cmake --build --preset ref && ctest --preset ref

asan-ubsan: setup  ## C++ tests under the address and undefined-behaviour sanitizers
	@scripts/sanitize.sh asan-ubsan

tsan: setup  ## C++ tests under the thread sanitizer
	@scripts/sanitize.sh tsan

matrix: setup  ## runs what docs/support_matrix.md claims, and writes it
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/matrix.py $(MATRIX_ARGS)

test-torch: setup  ## Python tests that touch torch with another one: VERSION=2.14.1 (several GB)
	@scripts/test_torch.sh "$(VERSION)"

fuzz: setup  ## fuzzers of all parsers, FUZZ_S seconds in all (needs clang)
	@FUZZ_S=$(FUZZ_S) scripts/fuzz.sh

format: setup  ## formats C++ and Python
	@git ls-files -co --exclude-standard -- '*.cpp' '*.hpp' | xargs $(BIN)/clang-format -i
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clang-tidy: setup  ## static analysis of the core (needs clang-tidy)
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --preset dev
	@git ls-files -co --exclude-standard -- 'core/*/src/*.cpp' | xargs clang-tidy -quiet -p build/dev

wheel: setup  ## a wheel in dist/
	@$(BIN)/python -m build --wheel

clean:  ## removes what was built, not .venv
	@rm -rf build dist
