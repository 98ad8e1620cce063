"""A test runs every command that the documents give to users, or this list says why not."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "docs/TUTORIAL.md",
    "docs/OPERATIONS.md",
    "docs/TOOLS.md",
    "docs/DISTRIBUTED.md",
    "deploy/kubernetes/README.md",
    "deploy/ray/README.md",
    "deploy/slurm/README.md",
)
SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```$|^#.*?$", re.MULTILINE | re.DOTALL)  # headings, too
PROGRAMS = (
    "apt",
    "docker",
    "etcdctl",
    "examples",
    "helm",
    "kubectl",
    "make",
    "pip",
    "py-spy",
    "python",
    "torch-ros",
    "torchrun",
    ".",
)

RUN = {  # the beginning of a command: the test that runs it, and words by which it does
    "P=": ("tests/test_operations.py", "A rollout does not update"),
    "etcdctl get --prefix $P": ("tests/test_operations.py", "A rollout does not update"),
    "etcdctl endpoint": ("tests/test_operations.py", "A rollout does not update"),
    "etcdctl compact $REV": ("tests/shard/test_refusing.py", '"compact"'),
    "etcdctl defrag": ("tests/shard/test_refusing.py", '"defrag"'),
    "etcdctl alarm list": ("tests/test_operations.py", "A rollout does not update"),
    "etcdctl alarm disarm": ("tests/test_operations.py", "etcdctl alarm disarm"),
    "etcdctl lease": ("tests/test_operations.py", "A rollout does not update"),
    "torch-ros push": ("tests/checkpoints/test_push_pull.py", '"push"'),
    "torch-ros pull": ("tests/checkpoints/test_push_pull.py", '"pull"'),
    "torch-ros archive": ("tests/bucket/test_bucket.py", '"archive"'),
    "torch-ros diff": ("tests/checkpoints/test_push_pull.py", '"diff"'),
    "torch-ros top": ("tests/cli/test_top.py", '"top"'),
    "torch-ros web": ("tests/cli/browsing.py", '"web"'),
    "torch-ros gc": ("tests/cli/test_gc.py", '"gc"'),
    "torch-ros verify": ("tests/cli/test_verify.py", '"verify"'),
    "torch-ros doctor": ("tests/cli/test_doctor.py", '"doctor"'),
    "torch-ros --json doctor": ("tests/cli/test_doctor.py", '"doctor"'),
    "torch-ros export": ("tests/cli/test_export.py", '"export"'),
    "torch-ros": ("tests/cli/test_ls.py", '"ls"'),
    "python -m torch_ros": ("tests/cli/test_ls.py", '"-m", "torch_ros"'),
    "python -m torch_ros.store.local": ("tests/test_operations.py", "The local etcd"),
    "export ETCDCTL_ENDPOINTS=$(": ("tests/test_operations.py", "The local etcd"),
    "export ETCDCTL_": ("tests/test_operations.py", "An etcd of your own"),
    "python trainer.py": ("tests/processes/test_tutorial.py", "trainer.py"),
    "python rollout.py": ("tests/processes/test_tutorial.py", "rollout.py"),
    "until torchrun": ("tests/processes/test_tutorial.py", '"until torchrun"'),
    "examples/torchrun_elastic.sh": ("tests/processes/test_elastic_example.py", "COMMAND"),
    "make demo-vllm": ("tests/engines/vllm/test_grpo_example.py", "grpo_with_vllm.py"),
    "sbatch deploy/slurm/job.sbatch": ("tests/deploy/slurm_cluster.py", "deploy/slurm/job.sbatch"),
    "squeue --me --steps": ("tests/deploy/slurm_cluster.py", '"--me", "--steps"'),
    "deploy/slurm/ready.sh": ("tests/deploy/slurm_cluster.py", "deploy/slurm/ready.sh"),
    "scancel --signal=TERM": ("tests/deploy/test_slurm.py", '"--signal=TERM"'),
    "scontrol requeue": ("deploy/slurm/job.sbatch", "scontrol requeue"),  # which a test submits
    "scancel": ("tests/deploy/test_slurm.py", '"scancel", job.number'),
    "deploy/kubernetes/secrets.sh": ("tests/deploy/test_kubernetes.py", "secrets.sh"),
    "python deploy/ray/actors.py": ("tests/engines/test_ray.py", "actors.py"),
    "torchrun --rdzv-backend=torch-ros": ("tests/processes/test_torchrun.py", "--rdzv-backend"),
}
NOT_RUN = {  # the beginning of a command: why no test runs it
    "docker build": "a test runs what it runs, but for Debian's packages",
    "helm": "needs a cluster; tests render what it applies",
    "kubectl": "needs a cluster; tests render what it applies, and run the processes",
    "make demo": "CI runs it",
    "make test": "CI runs it: it is the tests",
    "make docs": "CI runs it",
    "make bench": "takes minutes of an idle machine, and tells figures, not right from wrong",
    "pip install -e '.[cli]'": "CI installs the clone with this extra, and more",
    "pip install -e '.[bucket]'": "CI installs the clone with this extra, and more",
    "pip install -e '.[top]'": "CI installs the clone with this extra, and more",
    "pip install -e '.[tools]'": "CI installs the clone with the extras that it is made of",
    "pip install -e '.[web]'": "CI installs the clone with this extra, and more",
    "pip install -e '.[local]'": "CI installs the clone with this extra, and more",
    "apt install": "needs root; a machine of CI has it done",
    ". .venv/bin/activate": "changes the shell of the reader; venv's own",
    "export ETCDCTL_ENDPOINTS=etcd-host": "stands for a second machine; the tests put theirs there",
    "etcdctl get $P/shards/<reader>/<rank>": "a pattern; the list above it gets shards as printed",
    "etcdctl auth enable": "a remark; the test of SECURITY.md's commands runs it",
    "py-spy dump": "a tool of the reader's own",
    "python benchmarks/": "figures of a machine, two machines for costs.py",
}


def commands(name):
    text = (ROOT / name).read_text()
    for block in SHELL.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield " ".join(line.split())
    for quoted in re.findall(r"`([^`]+)`", CODE.sub("", text)):
        words = quoted.split()
        if len(words) > 1 and words[0].partition("/")[0] in PROGRAMS:
            yield " ".join(words)


def entry(command):
    """The longest beginning that is listed."""
    found = [start for start in (*RUN, *NOT_RUN) if command.startswith(start)]
    return max(found, key=len, default=None)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_command_is_run_or_has_a_reason(name):
    assert [command for command in commands(name) if entry(command) is None] == []


def test_the_list_has_only_commands_that_are_there():
    used = {entry(command) for name in DOCUMENTS for command in commands(name)}
    assert used == {*RUN, *NOT_RUN}


@pytest.mark.parametrize("start", RUN)
def test_a_test_runs_it(start):
    file, words = RUN[start]
    assert words in (ROOT / file).read_text()
