# `make demo` shows the tool, `make test` proves it, `make test-all` at length; each sets up what it needs in .venv.
PYTHON ?= python3
BIN := .venv/bin
# Two tests at a time, each with a thread of its own for small tensors.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal
AXOLOTL_RELEASES := 0.12.2 0.13.2 0.14.0 0.15.0 0.16.1 0.17.0 0.18.0 0.19.0 0.20.0 0.21.0
TRANSFORMERS_RELEASES := 4.57.3 5.0.0 5.8.0 5.10.4 5.14.1 5.17.0 5.23.0 5.24.0

# Where it is set, every process of the tests compiles the packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all test-faults check render skill docs clean
.PHONY: test-trainers test-trainers-axolotl test-axolotl test-megatron test-transformers test-deepspeed test-accelerate test-torchtune test-llama-factory test-rl test-sources
.PHONY: knowledge
.PHONY: test-mutations test-damage test-recognition test-messages test-parsers traces

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[reference,plot,test]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

# Most benchmarks run only on a GPU: here at least their calls are checked.
CALLS_ALONE := --ignore-missing-imports --follow-imports=silent --disable-error-code arg-type --disable-error-code assignment \
    --disable-error-code misc --disable-error-code operator --disable-error-code dict-item

check-types:
	$(BIN)/mypy

check-benchmarks:
	$(BIN)/mypy --config-file= --cache-dir=.mypy_cache/benchmarks $(CALLS_ALONE) benchmarks

check-style:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

check-card:
	$(BIN)/offload card check

# Beside each other, the longest first: in a new clone mypy takes half a minute of one core.
AT_ONCE := --no-print-directory --jobs $(WORKERS)
CHECKS := check-types check-benchmarks check-style check-card

.PHONY: $(CHECKS) fetch-megatron

check: setup
	@$(MAKE) $(AT_ONCE) $(CHECKS)

# The fast tier: under five minutes on two idle cores.
test: check
	$(PYTEST) -m 'not slow'

# Both tiers: under twenty minutes. Megatron judges our rules too, the newest release that this Python may install.
test-all: setup
	@$(MAKE) $(AT_ONCE) $(CHECKS) fetch-megatron
	$(PYTEST)

fetch-megatron:
	$(BIN)/python tests/megatron/fetch.py 0.16.1

# Every call of a training run may fail: 8,000 faults in optimizers, 3,200 elsewhere, 1,300 signals. At least half an hour.
test-faults: setup
	FAULT_SEEDS_TIMES=50 $(PYTEST) tests/faults tests/reference_impl/parking/test_parking_faults.py \
		tests/reference_impl/optimizers/test_interrupted_changes.py tests/reference_impl/trained_layers/test_interrupted.py \
		tests/reference_impl/optimizers/streamed/test_faults.py -o faulthandler_timeout=7200

# The real trainers and transformers' own models, in an environment of their own: they bring pyarrow, pandas and a
# hundred megabytes more.
test-trainers: .venv-trainers/.ready
	OMP_NUM_THREADS=1 .venv-trainers/bin/pytest --durations=5 tests/reference_impl/integrations tests/reference_impl/fitting \
	    tests/reference_impl/verification/test_trace_real_models.py tests/test_benchmarks.py tests/test_documents.py \
	    tests/reference_impl/verification/test_verify_plan_of_ranks.py::test_they_are_so_where_the_model_computes_its_loss \
	    tests/test_examples.py::test_a_trainer_offloads_by_one_line

.venv-trainers/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-trainers
	.venv-trainers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[reference,test,trainers]'
	touch $@

# `axolotl train` itself with our plugin, on a CPU; each release in an environment of its own.
TRAINED_AXOLOTL ?= 0.20.0 0.21.0

test-trainers-axolotl:
	$(PYTHON) tests/reference_impl/integrations/fetch_axolotl.py $(TRAINED_AXOLOTL)
	for version in $(TRAINED_AXOLOTL); do OMP_NUM_THREADS=1 build/axolotl-train/$$version/bin/python -m pytest \
	    tests/reference_impl/integrations/test_axolotl.py --durations=5 || exit 1; done

# The released schemas of Axolotl judge our rules: 10,000 generated configurations a release.
test-axolotl: setup
	$(BIN)/python tests/axolotl/fetch.py $(AXOLOTL_RELEASES)
	$(BIN)/pytest -m axolotl tests/axolotl --hypothesis-profile=axolotl -o faulthandler_timeout=3600

# Real argument classes judge the rules of Transformers: 5,000 generated configurations a release.
test-transformers: setup
	$(BIN)/python tests/judges/transformers/fetch.py $(TRANSFORMERS_RELEASES)
	$(BIN)/pytest -m transformers tests/judges/transformers --hypothesis-profile=transformers -o faulthandler_timeout=3600

# Each release in a process of its own; `newest` is PyPI's. MEGATRON=... and CONFIGURATIONS=... narrow it.
MEGATRON ?= 0.13.1 0.14.0 0.15.3 0.16.1 newest
CONFIGURATIONS ?= 10000

test-megatron: setup
	$(BIN)/python tests/megatron/fetch.py $(MEGATRON)
	$(BIN)/python tests/megatron/judge.py --configurations $(CONFIGURATIONS)

# Are slips noticed? 40 rules taken away and 60 conditions changed, one at a time.
SEED ?= 1

test-mutations: setup
	$(BIN)/python tests/judges/mutations.py --removed 40 --changed 60 --seed $(SEED)

# DeepSpeed's own configuration classes judge our rules, each release in a process of its own.
DEEPSPEED ?= 0.17.0 0.17.6 0.18.3 0.18.9 0.19.4 0.19.5 0.19.7 0.19.8
DEEPSPEED_CONFIGURATIONS ?= 5000

test-deepspeed: setup
	$(BIN)/python tests/judges/deepspeed/fetch.py $(DEEPSPEED)
	$(BIN)/python tests/judges/deepspeed/judge.py --configurations $(DEEPSPEED_CONFIGURATIONS) $(DEEPSPEED)

# torchtune's own recipes judge our rules, run without torch: 5,000 generated configurations a release.
TORCHTUNE ?= 0.5.0 0.6.1 0.7.0=https://github.com/pytorch/torchtune

test-torchtune: setup
	$(BIN)/python tests/judges/torchtune/fetch.py $(TORCHTUNE)
	$(BIN)/python tests/judges/torchtune/torchtune_judge.py --mutants

# LLaMA-Factory's own parser judges our rules, with the Trainer that gets its arguments: 5,000 generated configurations
# a release.
LLAMA_FACTORY ?= 0.9.0 0.9.3 0.9.5

test-llama-factory: setup
	$(BIN)/python tests/judges/llama_factory/fetch.py $(LLAMA_FACTORY)
	$(BIN)/python tests/judges/llama_factory/llama_factory_judge.py --mutants

# Launcher and plugins of released Accelerate judge reader and rules: 5,000 generated launches a release.
ACCELERATE ?= 1.13.0 1.14.0 1.15.0
LAUNCHES ?= 5000

test-accelerate: setup
	$(BIN)/python tests/judges/accelerate/fetch.py $(ACCELERATE)
	$(BIN)/python tests/judges/accelerate/judge.py --configurations $(LAUNCHES) $(ACCELERATE:%=build/accelerate/%)
	$(BIN)/python tests/judges/accelerate/plugins.py $(ACCELERATE:%=build/accelerate/%)

# The checks of verl, NeMo-RL, ms-swift and prime-rl that run without a GPU judge our rules.
test-rl: setup
	$(BIN)/python tests/judges/rl/fetch.py
	$(BIN)/python tests/judges/rl/judge.py --configurations 5000

# Programs, checks and models of image and video trainers, OpenRLHF, slime, miles and SkyRL judge our rules: 5,000 generated commands a
# release.
test-sources: setup
	$(BIN)/python tests/judges/sources/fetch.py
	$(BIN)/python tests/judges/sources/judge.py --configurations 5000

# The newest release of each framework, compared with the records, in one table; PACKAGES=... narrows it, also to
# releases (PACKAGES="deepspeed==0.18.3"). PACKAGES=recorded finds each quote again in each release that is recorded.
PACKAGES ?=

knowledge: setup
	$(BIN)/python tests/judges/knowledge/newest.py $(PACKAGES)

# The messages that quote a package's source, compared with it in several releases; torch's with the one that is installed.
QUOTED ?= deepspeed==0.17.0 deepspeed==0.18.9 deepspeed==0.19.8 megatron-core==0.14.0 megatron-core==0.16.1 \
    accelerate==1.6.0 accelerate==1.15.0 trl==0.23.0 trl==1.16.0

test-messages: setup
	$(BIN)/python tests/judges/messages/fetch.py $(QUOTED)
	PYTHONPATH=. $(BIN)/python tests/judges/messages/messages_judge.py

# The parsers that frameworks read configurations with judge our readers: 5,000 generated inputs a parser and release.
PARSER_INPUTS ?= 5000

test-parsers: setup
	$(BIN)/python tests/judges/parsers/fetch.py
	$(BIN)/python tests/judges/llama_factory/fetch.py $(LLAMA_FACTORY)
	$(BIN)/python tests/judges/rl/fetch.py
	$(BIN)/python tests/judges/deepspeed/fetch.py 0.17.6 0.19.8
	$(BIN)/python tests/megatron/fetch.py 0.19.2 extras
	$(BIN)/python tests/judges/parsers/parser_campaign.py --inputs $(PARSER_INPUTS)

# Traces the models that ship traced again; the environment needs torch and transformers.
traces: setup
	for each in skill_tools/knowledge/traces/*.json; do $(BIN)/offload trace $$each --out $$each || exit; done

render: setup
	$(BIN)/offload card render
	$(BIN)/offload card pages

# Damaged inputs for each of seventeen readers and for each other command, 51,000 of each: exit code 0, 1 or 2,
# each within 2 s, and nothing but read.
test-damage: setup
	$(BIN)/python tests/support/damage.py --inputs 3000
	$(BIN)/python tests/support/damage_answers.py --inputs 17000

# 12,952 files of 22 public repositories that hold nothing of ours: none is misread.
test-recognition: setup
	$(BIN)/python tests/judges/recognition/check.py

# An agent's installation, in build/skill: 2 MB without tests, benchmarks and evals.
skill:
	$(PYTHON) .ci/skill_bundle.py

# The documentation as a site in build/site, rules included; a broken link is an error.
docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	PYTHONPATH=. $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-trainers build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
