# `make book` and `make test` are all one needs: each makes .venv when it is missing or stale. `make help` lists the rest.

BIN  := .venv/bin
PY   := $(BIN)/python
BOOK := _build/html/index.html
NB   ?=
JOBS ?= 2
# Of `make versions`: versions of torch, and units, chapters, chapters_torch; by default all. `make gpu` has RUN, too.
TORCH ?=
RUN   ?=
# Of `make bench`: names of benchmarks; `python -m benchmarks --help` lists them.
BENCH ?= import backends kjt ebc quant sharded
# Of `make unpinned`: paths of tests; by default all.
TESTS ?=
# A chapter by its number (05), or a notebook by its name, with or without folder and ending.
NAME  = $(patsubst %.ipynb,%,$(notdir $(NB)))
BOOKS = $(wildcard notebooks/$(NAME).ipynb notebooks/$(NAME)_*.ipynb)

# Notebooks that take times, by what they call.
CLOCKS := fastest\(|take_turns|measure_steps|perf_counter|process_time|monotonic|[Tt]race[^db]
TIMED   = $(shell grep -lE '$(CLOCKS)' notebooks/*.ipynb)
UNTIMED = $(filter-out $(TIMED),$(wildcard notebooks/*.ipynb))

# One thread a process: tests and notebooks start processes of their own, and two cores are what is promised.
export OMP_NUM_THREADS ?= 1
# Every process of a test would compile the library, and every pytest the tests, where the environment has this.
unexport PYTHONDONTWRITEBYTECODE
# The command, not `python -m pytest`: that would put the current folder on the path, where ranks would then find tests/ by name.
PYTEST := $(BIN)/pytest -q

UNIT  := tests -n $(JOBS) --dist worksteal -m "not html and not live and not full and not soak"
QUICK := tests -n $(JOBS) --dist worksteal --hypothesis-profile=quick -m "not html and not live and not full and not soak and not slow and not world4"

.DEFAULT_GOAL := help
.PHONY: help venv book test quick random full lint types doctest unit notebooks notebooks-torch nb check html pdf shares bench parity ratios gpu versions unpinned wheel bare clean clean-venv format

help: ## list what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'

venv: ## .venv from requirements.txt, when it is missing or stale
	@.ci/venv

book: venv ## the executed book; prints the path of its first page
	@$(PY) book/_ext/build_book.py
	@test -f $(BOOK) && echo "The book: $(CURDIR)/$(BOOK)"

test: lint types unit notebooks notebooks-torch ## every test: style, types, unit, doctests, policy, notebooks on both backends
	@echo "== make test: all passed"

quick: lint types doctest ## at most 3 minutes: no notebooks, no slow tests, no worlds of four
	@echo "== unit tests and policy, without the slow ones and worlds of four"
	@$(PYTEST) $(QUICK)

random: venv ## the property tests with examples that are drawn anew
	@$(PYTEST) $(UNIT) --hypothesis-profile=random

full: venv ## what `make unit` covers pairwise: the whole products of sharding types, optimizers and inputs
	@$(PYTEST) tests -n $(JOBS) --dist worksteal -m "full and not html and not live and not soak"

check: lint types ## style, types and policy only
	@$(PYTEST) tests/policy

lint: venv ## ruff: rules and format
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: venv ## strip notebooks, let ruff repair what it can
	@$(PY) .ci/strip_notebooks.py notebooks/*.ipynb || true
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: venv ## basedpyright on src and benchmarks
	@echo "== basedpyright"
	@$(BIN)/basedpyright --level error

unit: venv doctest
	@echo "== unit tests and policy"
	@$(PYTEST) $(UNIT)

doctest: venv ## the examples in docstrings
	@echo "== examples in docstrings"
	@$(PYTEST) src benchmarks --doctest-modules -n $(JOBS) --timeout=900

# Both backends must run every chapter. nbmake stops a cell that hangs. `make book` takes what this run executed. Notebooks that take
# times run one by one, so that pages show those of a quiet machine.
notebooks: venv ## execute every notebook
	@echo "== notebooks that take times"
	@KEEP_FOR_BOOK=1 $(PYTEST) --nbmake --nbmake-timeout=120 $(TIMED)
	@echo "== the other notebooks"
	@KEEP_FOR_BOOK=1 $(PYTEST) -n $(JOBS) --nbmake --nbmake-timeout=240 $(UNTIMED)

notebooks-torch: venv ## execute every notebook on the plain-torch backend
	@echo "== notebooks, TUTOREC_BACKEND=torch"
	@TUTOREC_BACKEND=torch $(PYTEST) -n $(JOBS) --nbmake --nbmake-timeout=240 notebooks

nb: venv ## one chapter or page: make nb NB=05, make nb NB=page_two_tower
	@test -n "$(NB)" || { echo "which chapter? make nb NB=05, or a page: make nb NB=page_two_tower" >&2; exit 2; }
	@test -n "$(BOOKS)" || { echo "no notebooks/$(NAME)_*.ipynb and no notebooks/$(NAME).ipynb; there are: $$(ls notebooks)" >&2; exit 2; }
	@KEEP_FOR_BOOK=1 $(PYTEST) --nbmake --nbmake-timeout=120 $(BOOKS)

html: venv ## check the built book: no network, alt text, links
	@test -f $(BOOK) || { echo "no $(BOOK): run \`make book\` first" >&2; exit 2; }
	@$(PYTEST) tests/book -m html

pdf: venv ## the built book as one PDF, printed by Chromium
	@test -f $(BOOK) || { echo "no $(BOOK): run \`make book\` first" >&2; exit 2; }
	@$(PY) book/_ext/pdf.py

shares: venv ## share of code, output and figures in each chapter's height, measured in Chromium
	@test -f $(BOOK) || { echo "no $(BOOK): run \`make book\` first" >&2; exit 2; }
	@$(PY) tests/book/shares.py

bench: venv ## the benchmarks, as JSON under _build/bench: make bench [BENCH="kjt ebc"]
	@mkdir -p _build/bench
	@for name in $(filter-out sharded,$(BENCH)); do $(PY) -m benchmarks $$name --json _build/bench/$$name.json || exit 1; done
	@for w in $(if $(filter sharded,$(BENCH)),1 2 4); do $(PY) -m benchmarks sharded --world $$w --json _build/bench/sharded-$$w.json || exit 1; done

parity: venv ## run against torchrec 1.8.0 and 1.9.2 in .venv-parity, write golden results of 1.8.0 and chapter 20's data
	@.ci/parity

ratios: venv ## benchmarks beside torchrec 1.8.0 for chapter 20, about 6 minutes on an idle machine
	@.ci/parity ratios

# No venv: its kernels are those of a CPU; the script makes an environment with the CUDA wheels, after it has seen a GPU.
gpu: ## on a machine with NVIDIA GPUs, writes book/data/gpu.json: make gpu [RUN="tests chapters bench"] [PYTHON=...]
	@.ci/gpu $(RUN)

versions: venv ## units and chapters on oldest, pinned and newest torch: make versions [TORCH="2.6 2.15"] [RUN="units chapters"]
	@$(PY) .ci/versions.py $(TORCH) $(if $(RUN),--run $(RUN)) --jobs $(JOBS)

unpinned: venv ## quick tests and three notebooks in .venv-unpinned, which has no pins: make unpinned [TESTS="tests/teach"]
	@JOBS=$(JOBS) .ci/unpinned $(TESTS)

wheel: venv ## dist/tutorec-*.whl
	@rm -rf dist build
	@$(PY) -m build --wheel --outdir dist .
	@rm -rf build

bare: venv ## run the chapters where torch is installed and tutorec is not, as a hosted notebook does
	@$(PY) .ci/bare.py $(NB)

clean: ## remove what was built; environments stay
	@rm -rf _build dist build .pytest_cache .ruff_cache .hypothesis
	@find src benchmarks tests book -name __pycache__ -prune -exec rm -rf {} +

clean-venv: ## remove .venv, .venv-parity, .venv-gpu, .venv-unpinned and .venv-versions
	@rm -rf .venv .venv-parity .venv-gpu .venv-unpinned .venv-versions
