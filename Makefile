# For the people who build simpletune. Users need only ./train.sh.
# Times without a date: 22 November 2026, 2 shared cores of an Intel Xeon, Python 3.11, torch 2.13.0 CPU build.
SHELL := /usr/bin/env bash
PY := .venv/bin/python
BENCHMARK_TESTS := tests/benchmarks tests/data/storage/test_remote_cache.py tests/commands/doctor tests/docs/test_readme.py
TRITONS := 3.6.0 3.7.1 3.8.0 3.9.0
SLOW_SEED := $(or $(SEED),$(shell date +%Y%m%d))

.DEFAULT_GOAL := help
.PHONY: help setup quality style test durations flaky slow gpu dry host softgpu kernels pages coverage torture \
	torture-together soak web screens pictures compare predictions shapes docs map mutants canary image tiny-sd3 \
	tiny-sdxl tiny-sdxl-flow tiny-klein tiny-encoders clean

help:  ## show this list; takes no time
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with everything that the tests need; time not measured (mostly the download of torch)
	@source simpletune/setup.sh && simpletune_setup . dev

quality: setup  ## run ruff and mypy, change nothing; 50 s without mypy's cache; then list names that several modules define
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy --platform win32 --cache-dir .mypy_cache/win32 simpletune
	@$(PY) tests/support/repeated_names.py

style: setup  ## let ruff fix and format the code; 1 s
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test:  ## run what CI runs before make dry: quality, then every test not marked gpu or slow; the tests alone 3 min 56 s on 2 idle cores of an Intel Xeon (29 November 2026)
	@./test.sh

durations: setup  ## show which tests and files take most processor time, even on a busy machine; as long as the tests of make test
	PYTHONPATH=tests/support OMP_NUM_THREADS=1 $(PY) -m pytest -p processor_time -n auto --maxprocesses 4 --dist loadfile

flaky: setup  ## SEED=n: run the tests of make test 3 times, files and tests within files in random order, beside two busy loops of the same priority; 16 min each on 2 cores beside some more work (29 November 2026)
	@trap 'kill $$(jobs -p) 2>/dev/null' EXIT; for loop in 1 2; do timeout 6h bash -c 'while :; do :; done' & done; \
	for number in 1 2 3; do echo "order $(SLOW_SEED)$$number"; \
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --maxprocesses 4 --dist loadfile \
	  --random-order-bucket=module --random-order-seed=$(SLOW_SEED)$$number || exit 1; done

slow: setup  ## run the tests that take minutes or many GiB; of its 8,569 combinations an eighth, others each day or by SEED=n, SEED=all for all; 68 min on 2 cores beside twice as much other work (29 November 2026)
	@echo "combinations drawn with SEED=$(SLOW_SEED)"
	CASES_SEED=$(SLOW_SEED) OMP_NUM_THREADS=1 $(PY) -m pytest -m "slow and not gpu" -n 2 --dist worksteal --timeout 1800

gpu: setup  ## test and measure on a card: 13 stages within 30 minutes, the most informative first; continues where it stopped
	$(PY) -m benchmarks.first_hour

dry: setup  ## run torch's CUDA build on a simulated card (docs/explanation/without-a-gpu.md); makes .venv-cuda (5.7 GiB) first, then takes 6 min on 2 cores beside other work (AMD EPYC, 30 November 2026)
	@tests/gpu/dry_gpu/setup.sh
	DRY_STRICT=1 OMP_NUM_THREADS=1 PYTHONPATH=. tests/gpu/dry_gpu/run python -m pytest -n auto --maxprocesses 4 --dist loadfile \
		--timeout 900 -m "dry or (gpu and not values and not timing)"
	DRY_STRICT=1 DRY_CC=75 OMP_NUM_THREADS=1 PYTHONPATH=. tests/gpu/dry_gpu/run python -m pytest -m dry tests/gpu/dry_gpu/test_dry_fp16.py
	OMP_NUM_THREADS=1 PYTHONPATH=. $(PY) -m benchmarks dry

host:  ## processor seconds of a step on the host, beside diffusers and peft, on a simulated card; needs .venv-cuda of make dry; 5 min
	rm -f benchmarks/results/cpu/host.json
	PYTHONPATH=. $(PY) -m benchmarks host

kernels: setup  ## compile the Triton kernels for several cards with four versions of Triton, check the code; 50 min on 2 busy cores
	for version in $(TRITONS); do test -d .venv-triton$$version/triton || \
		$(PY) -m pip install --no-deps --target .venv-triton$$version triton==$$version || exit 1; done
	for version in $(TRITONS); do for grid in kernels elementwise; do PYTHONPATH=.venv-triton$$version \
		$(PY) -m benchmarks $$grid --out benchmarks/results/kernels --minutes 60 || exit 1; done; done

softgpu:  ## run the GPU path with values and races on a GPU in software (docs/explanation/without-a-gpu.md); needs .venv-cuda; 35 min on 2 cores beside some work (30 November 2026)
	PYTHONPATH=. tests/gpu/softgpu/run python -m pytest -m softgpu -n 2 tests/gpu/softgpu
	PYTHONPATH=. SOFT_SEED=1 tests/gpu/softgpu/run python -m pytest -m gpu -n 2 --timeout 1200 -p softgpu.selection tests/gpu/real

pages: setup  ## make committed pages again from their rows, and predict some of their rows again; 1 min 10 s of processor time (29 November 2026)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m pages --timeout 900

coverage: setup  ## show which code the tests run, and why the rest is not run; 16 min beside other work (23 November 2026)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile --cov --cov-report json:.coverage-fast.json
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile -m "slow and not gpu" --timeout 900 \
	  --cov --cov-append --cov-report json:.coverage.json $(BENCHMARK_TESTS)
	$(PY) tests/support/coverage_table.py .coverage-fast.json .coverage.json

torture: setup  ## kill runs 50 times at named and random moments, attack their files, fuzz the readers; 8 min on 2 cores beside other work (27 November 2026)
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests/support $(PY) tests/trainings/torture.py
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests/support $(PY) tests/trainings/attacks.py
	SIMPLETUNE_FUZZ=500 $(PY) -m pytest -q tests/trainings/test_fuzz.py tests/data/sources/test_data_odd.py

torture-together: setup  ## kill one or all of a run's 1, 2 or 4 processes 40 times, even while they prepare; 6 min on 2 cores (27 November 2026); 5 of them with one that is stopped, one that hangs, or torchrun killed
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests/support $(PY) tests/trainings/torture_together.py

soak: setup  ## train 20,000 steps of a tiny model with the page open, and look whether memory, descriptors, threads, page or report grow; FOLDER=f: keep the run there, and continue it; 10 min on 2 busy cores of an AMD EPYC (30 November 2026)
	OMP_NUM_THREADS=1 PYTHONPATH=. $(PY) -m benchmarks.soak $(if $(FOLDER),--folder $(FOLDER))

web: setup  ## click through the pages in headless Chromium (apt-get install chromium chromium-driver), slow tests included; 2 min 20 s on 2 cores (27 November 2026)
	OMP_NUM_THREADS=1 $(PY) -m pytest -rs -m "slow or not slow" --timeout 900 tests/apps/test_browser.py tests/apps/web/test_web_browser.py

screens: setup  ## draw docs/images/web_*: every page in every state, light on a desktop and dark on a phone; 3 min beside other work
	OMP_NUM_THREADS=1 PYTHONPATH=. $(PY) tests/support/web_screens.py

pictures: setup  ## draw docs/images/methods_grid.png, which trains the demo by five methods, and stage_peaks.svg, from the stored predictions; 8 min beside other work
	$(PY) -m benchmarks.stage_peaks
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.methods_grid

compare: setup  ## BASE=commit: short trainings by that commit and by the working tree; losses, weights, pictures equal to the bit? 2 min on one core (27 November 2026)
	OMP_NUM_THREADS=1 PYTHONPATH=. $(PY) -m benchmarks.compare_trees --base $(BASE) --rows "$(ROWS)"

predictions: setup  ## after a change of what estimate simulates: compute missing or changed predictions that ship; the 168 besides SDXL's take 12 min on 2 cores beside other work (27 November 2026)
	OMP_NUM_THREADS=1 PYTHONPATH=. $(PY) -m benchmarks.stored_predictions

shapes: setup  ## after a new model that ships, or a new diffusers: the shapes of every model that ships, which check reads; 15 s
	PYTHONPATH=. $(PY) -m benchmarks.stored_shapes

docs: setup  ## write the pages of docs/reference that the code defines, and build the documentation as a site in build/site; 15 s
	PYTHONPATH=. $(PY) docs/generate.py
	$(PY) docs/build_site.py

map: setup  ## find which tests run which line of the package, for ./test.sh --changed and make mutants; 10 min on 2 cores (29 November 2026)
	$(PY) tests/support/line_map.py

mutants: setup  ## SEED=n: 10 mutants of every room, drawn by the seed, against the tests that run their lines; makes a map first where the last one is of another tree
	$(PY) -c "import cosmic_ray" 2>/dev/null || $(PY) -m pip install --quiet "cosmic-ray>=8.7,<9"
	$(PY) tests/support/mutants.py --seed $(or $(SEED),1) --out benchmarks/results/mutants-seed-$(or $(SEED),1).md

canary: setup  ## run the fast suite with the newest of every library, upper bounds ignored, in .venv-canary (torch with CUDA unless SIMPLETUNE_TORCH_INDEX says otherwise); time not measured
	$(PY) tests/support/canary.py --out benchmarks/results/canary.md

image: setup  ## check the Dockerfile with hadolint, and where Docker runs build the image and train the demo in it; not yet run where Docker does
	.venv/bin/hadolint Dockerfile
	@docker info >/dev/null 2>&1 || { echo "Docker does not run here: no image is built"; exit 0; }; \
	docker build --build-arg VERSION="$$($(PY) -m setuptools_scm)" -t simpletune . && docker run --rm simpletune

tiny-sd3: setup  ## train the bundled tiny Stable Diffusion 3 from scratch; hours on 2 cores, resumable
	$(PY) -m benchmarks.tiny_models.make_tiny_sd3

tiny-sdxl: setup  ## train the UNet of the bundled tiny Stable Diffusion XL from scratch; 55 min on one thread of a busy machine, resumable
	$(PY) -m benchmarks.tiny_models.make_tiny_sdxl

tiny-sdxl-flow: setup  ## train the bundled tiny Stable Diffusion XL on by rectified flow, and a LoRA on the result; 17 min on one thread of a busy machine (4 min of it computing), resumable
	$(PY) -m benchmarks.tiny_models.make_tiny_sdxl_flow

tiny-klein: setup  ## train the transformer of the bundled tiny FLUX.2 klein from scratch; 13 min of steps on one thread (29 November 2026), and their evaluations; resumable
	$(PY) -m benchmarks.tiny_models.make_tiny_klein

tiny-encoders: setup  ## train the two tiny encoders that score the demo's pictures, from scratch; 30 min on one thread of a busy machine
	$(PY) -m benchmarks.tiny_models.train_tiny_encoders

clean:  ## remove caches and built files, keep .venv, runs/ and profiles/; seconds, not measured
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +
