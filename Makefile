# The same few words on every machine. Needs nothing but Python 3.10 or newer, make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
OLD := .venv-lightning
RAY := .venv-ray

.PHONY: setup lint format test test-long test-lightning test-kubernetes test-ray test-slurm test-real soak bench demo clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       two ranks train, one is killed, later one hangs; the job survives both"
	@echo "make test       the test suite: pip packages only, no root"
	@echo "make test-long  more cases of the fault tests, and those with many launchers; part of test-real"
	@echo "make test-lightning  resuming, with the oldest releases of Lightning"
	@echo "make test-kubernetes  against a real API server, which is built once and kept (5 minutes; root, Debian 12)"
	@echo "make test-ray   jobs on a real Ray cluster, which is started for it and stopped again (an environment of its own)"
	@echo "make test-slurm  on a real Slurm of four nodes on this host (root; installs Debian's slurm-wlm)"
	@echo "make test-real  tests that need root and Debian packages (network namespaces), and an S3 server from PyPI"
	@echo "make lint       ruff and mypy"
	@echo "make bench      the benchmarks; BENCH_NVRX=VENV adds the peer, BENCH_RAY=.venv-ray Ray"
	@echo "make soak       the long form of the fault tests, and those that are rarely worth their time"

setup: $(STAMP)

# torch first, under its pin: whatever depends on it then finds it there and pulls nothing else.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt) numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup
	$(BIN)/python -m pytest tests --ignore=tests/real -m "not long and not rare" -n 3 --dist worksteal
	@if test -d $(KUBERNETES); then \
	  $(BIN)/python -m pytest tests/integrations/kubernetes tests/documents -m "apiserver and not long and not rare"; \
	else echo "Left out: everything against a real Kubernetes API server. make test-kubernetes builds one."; fi

test-long: setup
	$(BIN)/python -m pytest tests --ignore=tests/real -m "long and not rare" -n 3 --dist worksteal

# The oldest releases of Lightning that run with this torch, in an environment of their own.
test-lightning:
	test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt) numpy
	$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . \
		lightning==2.0.9.post0 pytorch-lightning==2.0.0 "setuptools<81" pytest pytest-timeout
	$(OLD)/bin/python -m pytest -W ignore -o filterwarnings= tests/integrations/lightning/test_resume.py

# Where the built API server, scheduler and controller manager are kept.
KUBERNETES := $(or $(RESILIENCE_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/resilience)/kube-apiserver-1.20.2

$(KUBERNETES):
	tests/real/build_apiserver.sh $(KUBERNETES)

test-kubernetes: setup $(KUBERNETES)
	@command -v openssl >/dev/null || { apt-get update -qq && apt-get install -y -qq openssl; }
	$(BIN)/python -m pytest $(if $(SHORT),-m apiserver) tests/integrations/kubernetes tests/documents tests/real/test_kubernetes*.py

# Ray, in an environment of its own: torch first, under its pin. The cluster is one of this host's processes, all on loopback.
test-ray:
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt) numpy
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]' \
		'ray[train]>=2.60' omegaconf pytest pytest-timeout
	$(RAY)/bin/python -m pytest $(SHORT) $(if $(SHORT),,tests/integrations/ray) tests/real/test_ray*.py

test-slurm: setup
	@test "$$(id -u)" = 0 || { echo "make test-slurm needs root"; exit 1; }
	@for program in slurmctld slurmd srun munged; do PATH=$$PATH:/usr/sbin command -v $$program >/dev/null || { \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm slurm-client munge; break; }; done
	$(BIN)/python -m pytest $(SHORT) -n 2 $(if $(SHORT),,tests/integrations/slurm) tests/real/test_slurm.py

# Without what make test has had; Ray and Slurm without their rare cases too, which make test-ray and make test-slurm have.
test-real: SHORT := -m 'not rare'
test-real: setup test-kubernetes test-ray test-slurm test-long
	@test "$$(id -u)" = 0 || { echo "make test-real needs root"; exit 1; }
	@command -v ip >/dev/null || { apt-get update -qq && apt-get install -y -qq iproute2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[real]'
	$(BIN)/python -m pytest tests/real --ignore-glob='*/test_kubernetes*' --ignore-glob='*/test_ray*' --ignore=tests/real/test_slurm.py \
		-n 2 --dist loadfile

soak: setup
	SOAK_ROUNDS=$${ROUNDS:-100} $(BIN)/python -m pytest tests/soak -n 2 --timeout=0
	$(BIN)/python -m pytest tests --ignore=tests/real -m rare -n 2

bench: setup
	$(BIN)/python -m benchmarks

demo: setup
	@rm -rf .demo && mkdir -p .demo/work
	@OMP_NUM_THREADS=1 $(BIN)/resilience run --nproc-per-node=2 --max-restarts=3 --ft-run-dir=.demo/run examples/demo.py .demo/work
	@$(BIN)/resilience report .demo/run

clean:
	rm -rf $(VENV) $(OLD) $(RAY) .demo build dist *.egg-info
