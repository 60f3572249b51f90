# The two commands: `make demo` and `make test`. Each installs what it needs.
.PHONY: help setup demo test test-all lint format bench speed ranks bandwidth overlap offload cuda-headers sweep forecast interactions larger nightly dev asan tsan fuzz wheel clean

help:
	@echo "make demo     set up, then run the main job"
	@echo "make test     set up, then run every test"
	@echo "make setup    system packages, .venv with torch, the package and the command in .venv"
	@echo "make lint     formatting, naming, layers, headers, clang-tidy, ruff"
	@echo "make format   rewrite sources in the project's format"
	@echo "make test-all the Python tests with every model in every placement (an hour)"
	@echo "make bench    the benchmarks of bench/ (several minutes, quiet machine)"
	@echo "make speed    steps beside plain PyTorch, the disk and DeepSpeed (hours, quiet machine)"
	@echo "make ranks    two ranks beside FSDP2, DeepSpeed, compute and gloo (quarter of an hour, quiet machine)"
	@echo "make bandwidth  ranks on slow disks and a slow network (root; ten minutes, quiet machine)"
	@echo "make overlap  copies to an emulated device behind its computing (ten minutes, quiet machine)"
	@echo "make offload  what NVMe and updates take of ranks with emulated devices (a minute)"
	@echo "make sweep    budgets from too little to everything: refused or kept (half an hour)"
	@echo "make forecast  steps beside what zinf plan foretold (half an hour, quiet machine)"
	@echo "make interactions  what mechanisms give alone, in pairs and together (ten minutes, quiet machine)"
	@echo "make nightly  3,000 steps of random lengths at what engine.probe() names (hours)"
	@echo "make larger   1.3 B parameters in a control group of 5 GB (root; half an hour)"
	@echo "make dev      quick torch-free debug build and its tests"
	@echo "make asan | tsan   the core's tests under sanitizers"
	@echo "make fuzz     the store's readers under libFuzzer, 10 s each"
	@echo "make cuda-headers  compile the adapter against the headers of torch's CUDA wheel (a large download)"
	@echo "make wheel    a Python wheel in dist/"
	@echo "make clean    remove build/ (keeps .venv)"

setup:
	@scripts/setup.sh

demo: setup
	@scripts/demo.sh

test:
	@scripts/setup.sh --all
	@scripts/test.sh

test-all:
	@scripts/setup.sh --all
	@.venv/bin/python -m pytest -q --all tests/python

lint:
	@scripts/setup.sh --lint
	@scripts/lint.sh

format:
	@scripts/setup.sh --lint
	@scripts/format.sh

bench:
	@scripts/setup.sh --all
	@scripts/bench.sh

# DeepSpeed takes part where ZINF_DEEPSPEED_PYTHON and ZINF_PEERS are set.
speed: setup
	@command -v fio > /dev/null || [ "$$(id -u)" != 0 ] || apt-get -qq -y install fio > /dev/null
	@.venv/bin/python bench/e2e/speed.py --nvme $${ZINF_PATH:-build} --rows all --out bench/reports

ranks: setup
	@.venv/bin/python bench/e2e/ranks.py --out bench/reports

bandwidth: setup
	@.venv/bin/python bench/e2e/bandwidth.py --nvme $${ZINF_PATH:-build} --out bench/reports

overlap: setup
	@.venv/bin/python bench/e2e/overlap.py --out bench/reports

offload: setup
	@.venv/bin/python bench/e2e/offload.py --nvme $${ZINF_PATH:-build} --out bench/reports

cuda-headers: setup
	@scripts/check_cuda_headers.sh

sweep: setup
	@.venv/bin/python bench/e2e/budget_sweep.py --nvme $${ZINF_PATH:-build}

forecast: setup
	@.venv/bin/python bench/e2e/forecast.py --nvme $${ZINF_PATH:-build} --out bench/reports

interactions: setup
	@.venv/bin/python bench/e2e/interactions.py --nvme $${ZINF_PATH:-build} --out bench/reports

nightly: setup
	@.venv/bin/python bench/e2e/soak_lengths.py --nvme $${ZINF_PATH:-build}

larger: setup
	@.venv/bin/python bench/e2e/larger_than_memory.py --nvme $${ZINF_PATH:-build}

dev asan tsan:
	@cmake --preset $@ > /dev/null
	@cmake --build --preset $@
	@ctest --test-dir build/$@ -j2 --output-on-failure

fuzz:
	@scripts/setup.sh --lint
	@scripts/fuzz.sh

wheel: setup
	@.venv/bin/pip wheel --no-build-isolation --no-deps -w dist .

clean:
	rm -rf build dist
