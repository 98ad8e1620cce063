"""A cluster of Slurm on this host: its controller and nodes, with files and ports of their own."""

import contextlib
import getpass
import os
import signal
import subprocess
import sys
from pathlib import Path

from kit import until

from puppets.servers import free_port

ROOT = Path(__file__).parents[2]
PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
OURS = ("SLURM_", "TORCH_ROS_")
END_S = 60
LIMIT_S = 240  # a trainer waits 30 s for holders of a version before it asks the bucket
PAUSE_S = 0.5
NODES = ("one", "two")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
FirstJobId={first_job}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# How long the credentials of a job hold, and with them how long one that is requeued waits.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
NodeName=DEFAULT CPUs=2 RealMemory=4000
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port}\n"


class Cluster:
    """A controller and two nodes, from `with` on; what runs in it ends with it.

    Args:
        folder: Of all files, which jobs start in.
    """

    def __init__(self, folder):
        self.folder = folder
        self._mark = f"SLURM_CONF={folder}/slurm.conf"
        self.environment = {
            **{key: each for key, each in os.environ.items() if not key.startswith(OURS)},
            "SLURM_CONF": f"{folder}/slurm.conf",
            "PATH": PROGRAMS,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder),
            "TORCH_ROS_READY_DIR": str(folder),
        }
        self._ends = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as self._ends:
            self._begin()
            self._ends = self._ends.pop_all()
        return self

    def __exit__(self, *_):
        self._ends.close()

    def _begin(self):
        (self.folder / "state").mkdir()
        for name in ("examples", "deploy"):
            (self.folder / name).symlink_to(ROOT / name)
        text = CONFIGURATION.format(
            folder=self.folder,
            user=getpass.getuser(),
            controller=free_port(),
            first_job=(free_port() - 10_000) // 2,  # the port of its etcd, as etcd.sh has it
        )
        nodes = "".join(NODE.format(name=name, port=free_port()) for name in NODES)
        (self.folder / "slurm.conf").write_text(text + nodes)
        key = self.folder / "munge.key-file"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = ("socket", "key-file", "pid-file", "seed-file")
        files = [f"--{name}={self.folder}/munge.{name}" for name in names]
        # `--force`: the folders of tests are not open to other users.
        self._start("munged", "--foreground", "--force", *files)
        until((self.folder / "munge.socket").exists)
        self._ends.callback(self._end_processes)
        self._start("slurmctld", "-D", "-c")
        for name in NODES:
            self._start("slurmd", "-D", "-N", name)
        until(lambda: self.run("sinfo", "-hN", "-o%t").split() == ["idle"] * 2, pause_s=PAUSE_S)

    def _start(self, program, *options):
        with (self.folder / "daemons.log").open("a") as log:
            process = subprocess.Popen(
                [program, *options], env=self.environment, stdout=log, stderr=log
            )
        self._ends.callback(process.wait, END_S)
        self._ends.callback(process.terminate)

    def _end_processes(self):
        """Kill what the nodes have started, which are not our children."""

        def killed():
            found = [pid for pid in self.processes() if parent(pid) != os.getpid()]
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found

        until(killed)

    def processes(self, *words):
        """Those of this cluster whose command has all these words."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (process / "environ").read_bytes().split(b"\0")
                command = (process / "cmdline").read_text().split("\0")
                if self._mark.encode() in environment and set(words) <= set(command):
                    found.append(int(process.name))
        return found

    def run(self, *command, **environment):
        """The output of a command."""
        done = self.tried(*command, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tried(self, *command, **environment):
        return subprocess.run(
            command,
            env=self.environment | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=END_S,
        )


def parent(pid):
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


class Job:
    """A job of deploy/slurm, submitted as its README says; its name is the model's.

    Args:
        arguments: Of the trainer's program.
    """

    def __init__(self, cluster, model, *arguments, **environment):
        self.cluster, self.model = cluster, model
        script = "deploy/slurm/job.sbatch"
        said = cluster.run("sbatch", script, *arguments, TORCH_ROS_MODEL=model, **environment)
        self.number = said.split()[-1]

    def log(self):
        path = self.cluster.folder / f"torch-ros-{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, holds):
        """Wait until `holds()`; the error of one that is late has the end of the log.

        A controller of which nobody asks anything leaves a requeued job alone: change something.
        """

        def found():
            self.cluster.tried("scontrol", "update", f"jobid={self.number}", "comment=")
            return holds()

        try:
            return until(found, LIMIT_S, pause_s=PAUSE_S)
        except AssertionError as error:
            raise AssertionError(self.log()[-4000:]) from error

    def steps(self):
        """The steps of its rollouts, by their names."""
        said = self.cluster.run("squeue", "--me", "--steps", "--format=%j %i")
        return dict(line.split() for line in said.splitlines() if line.startswith("rollout-"))

    def ready(self, *options):
        """The versions that its rollouts use, by their names; empty if one uses none.

        Within an update it uses none.
        """
        script = ("deploy/slurm/ready.sh", self.number, *options)
        done = self.cluster.tried(*script, TORCH_ROS_MODEL=self.model)
        if done.returncode:
            return {}
        rows = (line.split() for line in done.stdout.splitlines())
        return {row[0]: int(row[-1]) for row in rows}

    def state(self):
        said = self.cluster.run("squeue", "--noheader", "--states=all", "--format=%A %T")
        return dict(map(str.split, said.splitlines())).get(self.number, "")

    def folders(self):
        """The folders of its etcd, which go with it."""
        found = self.cluster.folder.glob(f"torch-ros-{self.number}*")
        return [path.name for path in found if path.is_dir()]

    def archived(self):
        """The newest version in the bucket."""
        found = (self.cluster.folder / "weights" / self.model).glob("*/versions/*")
        return max((int(path.name.partition("-")[0]) for path in found), default=0)
