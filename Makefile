# `make demo` shows the tool, `make test` proves it; both set up what they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
AXOLOTL_RELEASES := 0.12.2 0.13.2 0.14.0 0.15.0 0.16.1 0.17.0 0.18.0 0.19.0

.PHONY: setup demo test test-axolotl test-megatron lint-code render clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[reference,plot,test]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

lint-code: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: setup lint-code
	$(BIN)/offload card check
	$(BIN)/python tests/megatron/fetch.py newest
	$(BIN)/pytest

# The released schemas of Axolotl judge our rules: 10,000 generated configurations a release.
test-axolotl: setup
	$(BIN)/python tests/axolotl/fetch.py $(AXOLOTL_RELEASES)
	$(BIN)/pytest -m axolotl tests/axolotl --hypothesis-profile=axolotl

# Each release in a process of its own; `newest` is what PyPI has. MEGATRON=... and CONFIGURATIONS=... narrow it.
MEGATRON ?= 0.13.1 0.14.0 0.15.3 0.16.1 newest
CONFIGURATIONS ?= 10000

test-megatron: setup
	$(BIN)/python tests/megatron/fetch.py $(MEGATRON)
	$(BIN)/python tests/megatron/judge.py --configurations $(CONFIGURATIONS)

render: setup
	$(BIN)/offload card render
	$(BIN)/offload card pages

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
