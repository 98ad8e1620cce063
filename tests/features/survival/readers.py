"""Readers that read one region again and again until they are ended. Run, never imported.

python readers.py '{"way": "tcp", "cards": ["..."], "descriptor": "...", "address": 0, ...}'

"start n" forks so many. "strike" ends all but some in the middle, by `how`: kill, close; "stop" and
"continue" do what they say, and "reap" waits for those that are gone. A reader exits with 3 where a
byte is wrong, with 4 where a read failed, and with 0 where it was told to close.
"""

import json
import os
import random
import signal
import sys
import time

import numpy as np
from ways import FAILED, WRONG, transport_of, ways_of

from torch_ros.deadline import Deadline
from torch_ros.errors import TransferFailed
from torch_ros.spans import Region
from torch_ros.transfer.posting import Watcher, parts, perform

LIMIT_S = 120


class Readers:
    """Processes that read from one source.

    Args:
        way: By which they read.
        cards: The connections that readers use in turn.
        value: Of all bytes of the region.
    """

    def __init__(self, way, cards, descriptor, address, size, value):
        self.way, self.cards = way, [bytes.fromhex(card) for card in cards]
        self.descriptor, self.span = bytes.fromhex(descriptor), (address, size)
        self.value, self.pids, self.started = value, [], 0

    def start(self, count):
        """Fork so many readers, each of which has begun to read when this returns."""
        ready, told = os.pipe()
        for _ in range(int(count)):
            self.started += 1
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = self._read(told)
                finally:
                    os._exit(code)
            self.pids.append(pid)
        os.close(told)
        for _ in range(int(count)):
            assert os.read(ready, 1), "a reader has ended"
        os.close(ready)
        return len(self.pids)

    def _read(self, told):
        """Read until SIGTERM, which closes the read in the middle."""
        ends = []
        signal.signal(signal.SIGTERM, lambda *_: ends.append(True))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        transport = transport_of(self.way)
        address, size = self.span
        target = np.zeros(size, np.uint8)
        transport.register([Region(target.ctypes.data, size)])
        peer = transport.connect(self.cards[self.started % len(self.cards)])
        peer.attach(self.descriptor)
        spans = np.array([[address, target.ctypes.data, size]], np.uint64)
        reads = [peer.prepare(part) for part in parts(spans)]
        assert all(ways_of(read) == {self.way} for read in reads)

        class Ending(Watcher):
            def still(self, flying):
                if ends:
                    raise InterruptedError

        has_begun = False
        while True:
            target[:] = 0
            try:
                for read in reads:
                    read.post()
                if not has_begun:
                    has_begun = bool(os.write(told, b"."))
                while not all(read.is_done() for read in reads):
                    if ends:
                        raise InterruptedError
                perform(reads, Deadline("to read", LIMIT_S), Ending())
            except InterruptedError:
                for read in reads:
                    read.close()
                transport.close()
                return 0
            except TransferFailed:
                return FAILED
            if not (target == self.value).all():
                return WRONG

    def strike(self, number, most_s):
        """Send a signal to each, at moments by chance, and return how each ended."""
        for pid in self.pids:
            time.sleep(random.random() * float(most_s) / len(self.pids))
            os.kill(pid, int(number))
        if int(number) == signal.SIGSTOP:
            return [os.waitpid(pid, os.WUNTRACED)[1] & 0xFF for pid in self.pids]
        if int(number) == signal.SIGCONT:
            return []
        return self.reap()

    def reap(self):
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        self.pids = []
        return ends


def main():
    readers = Readers(**json.loads(sys.argv[1]))
    print(json.dumps("here"), flush=True)
    for line in sys.stdin:
        do, *words = line.split()
        print(json.dumps(getattr(readers, do)(*words)), flush=True)


if __name__ == "__main__":
    main()
