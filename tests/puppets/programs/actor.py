"""A process with one handle that does as it is told, a line of JSON each. Run, never imported:

{"do": "publish", "version": 1}  ->  {"answer": null, "seconds": 0.01}
"""

import json
import logging
import os
import signal
import sys
import threading
import time

import torch

import torch_ros
from torch_ros.deadline import Deadline
from torch_ros.errors import TorchRosError
from torch_ros.protocol.keys import parse_reader, replica_of
from torch_ros.store.loops import Done
from torch_ros.transfer.card import ALL_BLOCKS, Word

TENSORS, ELEMENTS = 64, 4 << 20  # of 16 MiB each: a GiB, unless told otherwise


class Actor:
    def __init__(self, model, name, tensors=TENSORS, elements=ELEMENTS, **options):
        self.handle = torch_ros.open(model, replica=name, **{"timeout_s": 30, **options})
        self.tensors = {
            f"w{i:02}": torch.zeros(elements, dtype=torch.int32) for i in range(tensors)
        }
        self.handle.register(self.tensors)

    def fill(self, version):
        for index, tensor in enumerate(self.tensors.values()):
            tensor.fill_(1000 * version + index)

    def is_whole(self, version):
        return all(
            bool(torch.all(tensor == 1000 * version + index))
            for index, tensor in enumerate(self.tensors.values())
        )

    def publish(self, version):
        self.handle.publish(version)

    def unpublish(self):
        self.handle.unpublish()

    def replicate(self, version="latest", at_half=None, pids=None):
        """Read a version. In its middle: stop this process, or kill the source, one of `pids`."""
        found = {}
        if at_half:
            act = threading.Thread(target=self.act_at_half, args=(at_half, pids, found))
            act.start()
        try:
            found["version"] = self.handle.replicate(version)
            found["ended_s"] = time.monotonic()
        finally:
            if at_half:
                act.join()
        report = self.handle.last_read
        return {**found, "source": report.source, "reroutes": report.reroutes}

    def act_at_half(self, what, pids, found):
        self.await_blocks(1 if pids else TENSORS // 2)
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        for pid in pids.values():  # else all may be read sooner than etcd answers
            os.kill(pid, signal.SIGSTOP)
        victim = self.source()
        there = self.await_blocks(1)
        found.update(killed=victim, killed_s=time.monotonic(), left=1 - there / TENSORS)
        os.kill(pids.pop(victim), signal.SIGKILL)
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)

    def await_blocks(self, count):
        mailbox = self.handle._shard.mailbox
        while not count <= (there := Word.unpack(int(mailbox._word[0])).position) < ALL_BLOCKS:
            assert there != ALL_BLOCKS, "it was over before this was seen"
            time.sleep(0.0005)
        return there

    def source(self):
        """Whom this replica reads from now."""
        seat = self.handle._shard.group.seat
        keys = seat.keys.readers()
        deadline = Deadline("looking for the source", 5)
        group = self.handle._shard.group
        found = group.ask((keys,), lambda view: Done(list(view.entries)), deadline)
        return next(replica_of(s) for s, r, _ in map(parse_reader, found) if r == seat.inst)

    def update(self, timeout_s=None):
        return self.handle.update(timeout_s=timeout_s)

    def version(self):
        return self.handle.version

    def list(self):
        return {version: sorted(names) for version, names in self.handle.list().items()}

    def close(self):
        self.handle.close()


def main():
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    actor = Actor(**json.loads(sys.argv[1]))
    print(json.dumps({"answer": "here"}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        started_s = time.monotonic()
        try:
            said = {"answer": getattr(actor, told.pop("do"))(**told)}
        except TorchRosError as error:
            said = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps({**said, "seconds": time.monotonic() - started_s}), flush=True)


if __name__ == "__main__":
    main()
