# Everything from a fresh clone with nothing but Python (3.11 or newer) and make. docs/contributing.md says the same without make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= test,text
comma := ,
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: setup train check test test-slow bench docs lint clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

train: setup
	$(BIN)/python train_optimized.py --fast_detection --label_column label

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lint: check
	$(BIN)/python -m tests.support.audit_dependencies

# make test is what CI runs: no network beyond the installation, under ten minutes on two cores.
test: check
	$(BIN)/pytest -n logical -m "not slow"

# With the extras ray, whose cluster takes seconds to start, onnx, loggers, docs, since the site is built, and examples.
test-slow:
	$(MAKE) setup EXTRAS=docs,examples,loggers,onnx,ray,test,text
	$(BIN)/pytest -n logical -m slow

bench:
	$(MAKE) setup EXTRAS=bench,test,text
	$(BIN)/python -m benchmarks.bench

# The site, as files that a browser opens: site/index.html.
docs:
	$(MAKE) setup EXTRAS=docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
