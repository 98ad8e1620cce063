"""The warm parent: it has imported torch, and forks processes that have it then. Never imported.

python warm.py LISTENER

A fork of it serves each process that runs tests, over a connection. All of them end when standard
input does.

A request is JSON, a program's name and source, its arguments and environment, and six files: its
standard streams, one that is told the process's id, its stops and its end, and the namespaces of
networks and mounts in which it is to run. The fork runs the
program as `python NAME ARGUMENTS` would: as `__main__`, and to the end that every interpreter has.
It has a session of its own, and is killed when the tests end without it. NIXL and gRPC start
threads, which no fork survives: each process imports them itself.
"""

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import types
from pathlib import Path

import cryptography.hazmat.primitives.asymmetric.ec
import cryptography.x509  # noqa: F401  # a tenth of a second
import numpy as np  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

PR_SET_PDEATHSIG = 1


def meet(listener):
    """Return a connection, in a fork of its own; None when the tests have ended."""
    gc.freeze()  # or a fork's first collection writes to all pages that it shares
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while 0 not in select.select([0, listener], [], [])[0]:
        requests, _ = listener.accept()
        if os.fork() == 0:
            end_with_parent()
            listener.close()
            return requests
        requests.close()
    return None


def serve(requests):
    """Return a program that is to be run, in a fork of its own; None when nobody asks any more."""
    while True:
        request, files, *_ = socket.recv_fds(requests, 1 << 20, 6)
        if not request:
            return None
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent()
            *streams, report, net, mnt = files
            child = os.fork()
            if child == 0:
                os.close(report)
                end_with_parent()
                enter(net=net, mnt=mnt)
                return become(streams, **json.loads(request))
            watch(child, [*streams, net, mnt], report)
        for file in files:
            os.close(file)


def end_with_parent():
    """Ask Linux for SIGKILL when the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter(**namespaces):
    """Go into those where this process is not yet, which takes root."""
    directory = Path.cwd()
    for kind, file in namespaces.items():
        if os.fstat(file).st_ino != Path(f"/proc/self/ns/{kind}").stat().st_ino:
            assert ctypes.CDLL(None).setns(file, 0) == 0, f"cannot enter a namespace: {kind}"
        os.close(file)
    os.chdir(directory)  # a namespace of mounts is entered at its root


def watch(child, files, report):
    """Tell what becomes of `child`, a line each, and end with it."""
    for file in files:
        os.close(file)
    os.write(report, f"pid {child}\n".encode())
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.write(report, b"stopped 0\n")
        else:
            os.write(report, f"ended {os.waitstatus_to_exitcode(status)}\n".encode())
            os._exit(0)


def become(streams, name, source, arguments, environment):
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = [name, *arguments], str(Path(name).parent)
    main = types.ModuleType("__main__")
    main.__file__ = name
    return main, compile(source, name, "exec")


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "an import has started a thread"
    if (requests := meet(socket.socket(fileno=int(sys.argv[1])))) and (found := serve(requests)):
        parent, (sys.modules["__main__"], code) = sys.modules["__main__"], found
        exec(code, vars(sys.modules["__main__"]))
