"""The ways over which sources are read here: their transports, as `open` makes them."""

from torch_ros.features.shortcuts.transport import ShortcutTransport
from torch_ros.features.tcp.transport import TcpTransport

# By the kernel: out of memory of a process's own, or of a sealed file that readers map.
KERNELS = {"cma": "kernel", "mapped": "mapped"}
WRONG, FAILED = 3, 4  # how a reader exits where a byte is wrong, or a read failed


def transport_of(way):
    """A process's transport: TCP, which has copies before it if the way is the kernel's."""
    made = TcpTransport()
    return ShortcutTransport(made, threads=2) if way in KERNELS.values() else made


def ways_of(read):
    """The ways over which its bytes come."""
    return {KERNELS.get(name, name.partition(",")[0]) for name, _ in read.ways}
