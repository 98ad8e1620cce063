"""Containers of manifests as processes of this machine, in a network and with names of their own.

Each pod has an address of loopback in the place of 0.0.0.0, and its mounts are folders.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from puppets.servers import etcd_programs

EXAMPLES = Path(__file__).parents[2] / "examples"
WAIT_S = 30


class Refused(Exception):
    """This machine makes no such network; the message says why."""


class Pods:
    """Pods that run from `with` on, and end with it.

    Args:
        folder: Of all files: mounts, and what processes print.
        secrets: What each Secret has, by its name.
        names: The addresses of pods, by the names at which others reach them.
    """

    def __init__(self, folder, secrets, names):
        self.folder, self.secrets, self.names = folder, secrets, names
        self._ends = contextlib.ExitStack()

    def __enter__(self):
        hosts = self.folder / "hosts"
        # Connections come from 127.0.0.1, whichever address of loopback they go to.
        lines = ["127.0.0.1 localhost"] + [
            f"{each} {name}" for name, at in self.names.items() for each in (at, "127.0.0.1")
        ]
        hosts.write_text("\n".join(lines) + "\n")
        begin = f"ip link set lo up && mount --bind {hosts} /etc/hosts && echo begins && read end"
        self._within = subprocess.Popen(
            ["unshare", "--mount", "--net", "sh", "-c", begin],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._ends.callback(self._within.communicate)  # the end of its input ends it
        if (said := self._within.stdout.readline()) != "begins\n":
            self._ends.close()
            raise Refused(said.strip())
        return self

    def __exit__(self, *_):
        self._ends.close()

    def start(self, name, at, spec, command=None):
        """Run a pod's container, or a command in it; its output goes to the file `name`."""
        [container] = spec["containers"]
        places = dict(self._places(name, spec, container))
        environment = {"HOSTNAME": name, "TORCH_ROS_READY_DIR": str(self.folder)}

        def told(text):
            for variable, value in environment.items():
                text = text.replace(f"$({variable})", value)
            for place, here in sorted(places.items(), reverse=True):  # the longer first
                text = text.replace(place, str(here))
            return text.replace("0.0.0.0", at)

        for each in container["env"]:
            environment[each["name"]] = told(each["value"]) if "value" in each else name
        kept = {key: os.environ[key] for key in ("PYTHONPATH", "HOME") if key in os.environ}
        programs = (Path(sys.executable).parent, etcd_programs(), os.environ["PATH"])
        path = ":".join(map(str, programs))
        # A shell's script is its container's own: it gets no address, nor a variable of the pod's.
        shown = command or container["command"]
        words = shown if shown[0] == "sh" else [told(word) for word in shown]
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                ["nsenter", f"--target={self._within.pid}", "--mount", "--net", "--", *words],
                env=environment | kept | {"PATH": path, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
        self._ends.callback(process.wait, WAIT_S)
        self._ends.callback(process.kill)
        return process

    def run(self, *arguments):
        """Its exit code."""
        return self.start(*arguments).wait(WAIT_S)

    def said(self, name):
        return (self.folder / f"{name}.log").read_text()

    def end(self, process):
        """Its exit code, as Kubernetes ends it."""
        process.send_signal(signal.SIGTERM)
        return process.wait(WAIT_S)

    def _places(self, name, spec, container):
        """What stands for each mount here; what the image has."""
        volumes = {each["name"]: each for each in spec.get("volumes", ())}
        for mount in container["volumeMounts"]:
            here = self.folder / name / mount["name"]
            here.mkdir(parents=True, exist_ok=True)
            if secret := volumes.get(mount["name"], {}).get("secret"):
                for file, content in self.secrets[secret["secretName"]].items():
                    (here / file).write_bytes(content)
            if mount["mountPath"] != "/dev/shm":
                yield mount["mountPath"], here
        yield "/opt/torch-ros", EXAMPLES
