"""Sources that end, one after the other, as a program does. Run, never imported.

python exits.py COUNT WAY

Each is a fork of this process that says where it is, and ends when it is told to "go"; this process
says how.
"""

import os
import sys
import threading

import numpy as np
from ways import transport_of

from torch_ros.p2p import shared
from torch_ros.spans import Region

for _number in range(int(sys.argv[1])):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        break
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    sys.exit(0)

way, size = sys.argv[2], 32 << 20
is_file = way == "mapped"
memory = np.frombuffer(shared.allocate(size), np.uint8) if is_file else np.empty(size, np.uint8)
memory[:] = 7
transport = transport_of(way)
registration = transport.register([Region(memory.ctypes.data, memory.nbytes)])
reading = transport_of(way)  # it reads as well, in a thread that nobody ends
target = np.zeros(1 << 20, np.uint8)
reading.register([Region(target.ctypes.data, target.nbytes)])
peer = reading.connect(transport.connection)
peer.attach(registration.descriptor)
read = peer.prepare(np.array([[memory.ctypes.data, target.ctypes.data, target.nbytes]], np.uint64))


def read_on():
    while True:
        read.post()
        while not read.is_done():
            pass


threading.excepthook = lambda *_: None  # its transport ends under it
threading.Thread(target=read_on, daemon=True).start()
print(transport.connection.hex(), registration.descriptor.hex(), flush=True)
assert sys.stdin.buffer.raw.readline() == b"go\n"
if _number % 2:
    sys.exit(0)
