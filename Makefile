# For the people who build simpletune. Users need only ./train.sh.
SHELL := /usr/bin/env bash
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup quality style test slow gpu coverage torture mutants tiny-sd3 clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with what the tests need
	@source simpletune/setup.sh && simpletune_setup . dev

quality: setup  ## ruff and mypy, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

style: setup  ## let ruff mend and format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test:  ## what CI runs: quality, then every test not marked gpu or slow
	@./test.sh

slow: setup  ## the tests that take minutes or many GiB
	$(PY) -m pytest -m "slow and not gpu"

gpu: setup  ## the tests that need an NVIDIA GPU, then the grids of memory and speed, in shards of 8 minutes
	$(PY) -m pytest -m gpu
	$(PY) -m benchmarks estimate --out benchmarks/results/gpu
	$(PY) -m benchmarks speed --out benchmarks/results/gpu

coverage: setup  ## what of the package and the benchmarks the tests run, and why the rest is not run
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile --cov --cov-report json:.coverage.json
	$(PY) tests/coverage_table.py .coverage.json

torture: setup  ## kill 50 runs at named and random moments (10 minutes on 2 idle cores), attack its files, fuzz what is read
	OMP_NUM_THREADS=1 PYTHONPATH=. $(PY) tests/torture.py
	OMP_NUM_THREADS=1 PYTHONPATH=. $(PY) tests/attacks.py
	SIMPLETUNE_FUZZ=500 $(PY) -m pytest -q tests/test_fuzz.py tests/test_data_odd.py

mutants: setup  ## does a test fail for each fault of tests/mutants.toml? begins none after 30 minutes, and then goes on
	PYTHONPATH=. $(PY) tests/mutants.py --minutes 30

tiny-sd3: setup  ## make the tiny Stable Diffusion 3 that comes with the tool, from nothing; hours on 2 cores, resumable
	$(PY) -m simpletune.demo.make_tiny_sd3

clean:  ## remove caches and built files; keeps .venv, runs/ and profiles/
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
