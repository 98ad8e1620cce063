"""Public calls of one process, interrupted at random moments, and gone on with.

usage: interrupted.py ENDPOINT TRANSPORT COUNT SEED

Prints one row of JSON. Whatever does not end within a minute ends the process, with the stacks of
its threads.
"""

import faulthandler
import json
import random
import signal
import sys
import threading
import time
from collections import Counter

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torch_ros
from torch_ros.dcp import ROSReader, ROSWriter
from torch_ros.errors import TorchRosError

TTL_S = 2
HANG_S = 60.0
MODEL = "interrupted"


class Process:
    def __init__(self, endpoint, transport, seed):
        self.endpoint, self.transport, self.rng = endpoint, transport, random.Random(seed)
        self.version, self.opened = 0, 0
        self.usual_s = {}
        self.interrupted, self.errors = Counter(), Counter()
        self.closing_s = []
        self.weights = {f"t{i}": torch.zeros(1000 * i) for i in range(1, 6)}
        self.target = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self.trainer = self.open("trainer")
        self.rollout = self.open("rollout")
        self.trainer.register(self.weights)
        self.rollout.register(self.target)

    def open(self, replica):
        return torch_ros.open(
            MODEL,
            endpoint=self.endpoint,
            replica=replica,
            transport=self.transport,
            ttl_s=TTL_S,
            timeout_s=20,
            drain_s=1,
        )

    # What is interrupted

    def publish(self):
        self.trainer.unpublish()
        self.registered(self.trainer, self.weights)
        self.version += 1
        for tensor in self.weights.values():
            tensor.fill_(self.version)
        self.trainer.publish(self.version)

    def publish_copy(self):
        self.version += 1
        self.trainer.publish_copy(self.version, self.weights)

    def save(self):
        self.version += 1
        writer = ROSWriter(self.version, handle=self.trainer)
        dcp.save(self.weights, storage_writer=writer, no_dist=True)

    def unpublish(self):
        self.trainer.unpublish()

    def register(self):
        self.rollout.unpublish()
        self.rollout.unregister()
        self.registered(self.rollout, self.target)

    def replicate(self):
        self.rollout.unpublish()
        self.registered(self.rollout, self.target)
        self.rollout.replicate("latest", timeout_s=3)

    def update(self):
        self.registered(self.rollout, self.target)
        self.rollout.update("latest", timeout_s=3)

    def load(self):
        reader = ROSReader("latest", handle=self.rollout, timeout_s=3)
        dcp.load(self.target, storage_reader=reader, no_dist=True)

    def read(self):
        self.rollout.read("latest", self.target, timeout_s=3)

    def serve(self):
        self.read()
        self.rollout.serve(timeout_s=3)

    def stream(self):
        with self.rollout.stream("latest", self.weights, buffer_bytes=8000, timeout_s=3) as stream:
            came = [fqn for fqn, tensor in stream if bool((tensor == tensor[0]).all())]
        assert came == list(self.weights), came

    def contents(self):
        self.rollout.contents(timeout_s=3)

    def list(self):
        self.rollout.list()

    def wait(self):
        self.rollout.wait(lambda _: False, timeout_s=0.05)

    def open_and_close(self):
        self.opened += 1
        guest = self.open(f"guest{self.opened}")
        self.closed(guest)

    # How

    def registered(self, handle, tensors):
        if handle.version is None:
            handle.unregister()
            handle.register(tensors)

    def closed(self, handle):
        started_s = time.monotonic()
        try:
            handle.close()
        finally:
            self.closing_s.append(time.monotonic() - started_s)

    def strike(self, call):
        """`call`, with one Ctrl-C at a moment by chance."""
        name = call.__name__
        after_s = self.rng.uniform(0, 1.1 * self.usual_s.get(name, 0.05))
        started_s = time.monotonic()
        is_struck = False
        try:
            signal.setitimer(signal.ITIMER_REAL, max(after_s, 1e-6))
            try:
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            is_struck = True
        except CheckpointException as error:
            ((why, _),) = error.failures.values()
            is_struck = isinstance(why, KeyboardInterrupt)
            if not is_struck:
                self.fail(name, why)
        except TorchRosError as error:
            self.fail(name, error)
        if is_struck:
            self.interrupted[name] += 1
        else:
            took_s, usual_s = time.monotonic() - started_s, self.usual_s.get(name, 0.05)
            self.usual_s[name] = usual_s + 0.3 * (took_s - usual_s)

    def fail(self, name, error):
        if not isinstance(error, TorchRosError):
            raise error
        self.errors[f"{name}: {type(error).__name__}: {str(error)[:80]}"] += 1

    def check(self):
        """That all goes on: a version is published and read."""
        self.publish()
        self.update()
        assert self.rollout.version == self.version, (self.rollout.version, self.version)
        for tensor in self.target.values():
            assert bool((tensor == self.version).all())

    def run(self, count):
        self.check()
        calls = [
            *(self.publish, self.publish_copy, self.save, self.unpublish, self.register),
            *(self.replicate, self.update, self.load, self.read, self.serve, self.stream),
            *(self.contents, self.list, self.wait, self.open_and_close),
        ]
        tries = 0
        while tries < 10 * count and (
            sum(self.interrupted.values()) < count or len(self.interrupted) < len(calls)
        ):
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            self.strike(calls[tries % len(calls)])
            tries += 1
            if tries % 50 == 0:
                self.check()
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        self.check()
        seats = [handle._shard.group.seat.inst for handle in (self.trainer, self.rollout)]
        threading.Event().wait(2.5 * TTL_S)  # long enough to lose a lease that nobody renews
        there = self.trainer.list().get(self.version, set())
        kept = seats == [handle._shard.group.seat.inst for handle in (self.trainer, self.rollout)]
        streams = [each.name for each in threading.enumerate() if "streams" in each.name]
        self.closed(self.rollout)
        self.closed(self.trainer)
        return {
            "interrupted": dict(self.interrupted),
            "errors": dict(self.errors),
            "there": sorted(there),
            "kept": kept,
            "streams": streams,
            "slowest_close_s": max(self.closing_s),
        }


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    print(
        json.dumps(Process(sys.argv[1], sys.argv[2], int(sys.argv[4])).run(int(sys.argv[3]))),
        flush=True,
    )
