"""Whether this host can be read by transport="tcp": for `torch-ros doctor`."""

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from torch_ros.channels.addresses import Listen, parse_listen, place
from torch_ros.deadline import Deadline
from torch_ros.errors import TorchRosError
from torch_ros.features.tcp.transport import TcpTransport
from torch_ros.spans import Region

BYTES = bytes([0x5A]) * 4096  # the content of what is read
TRY_S = 5.0


def tried(listen: str) -> tuple[Sequence[str], str]:
    """The addresses at which readers elsewhere look for a process of this host, and what is wrong
    if one of this host cannot read another; "". Takes milliseconds, and a port of the kernel's
    choice in place of those of `listen`.
    """
    host, network = place()
    try:
        asked = Listen(parse_listen(listen).hosts, text=listen) if listen else Listen()
        with closing(TcpTransport(listen=asked)) as source:
            for near in (network, -1):  # plain, then sealed
                where = Listen(("127.0.0.1",))
                with (
                    closing(TcpTransport(listen=where, place=(host, near))) as one,
                    closing(TcpTransport(place=(host, network))) as reader,
                ):
                    _read(one, reader)
            return source.told, ""
    except (TorchRosError, OSError) as error:
        return (), str(error)


def _read(source: TcpTransport, reader: TcpTransport) -> None:
    """Raises: TorchRosError: It cannot be read. OSError: Other bytes came."""
    held, here = np.frombuffer(BYTES, np.uint8), np.zeros(len(BYTES), np.uint8)
    shown = source.register([Region(held.ctypes.data, held.nbytes)])
    reader.register([Region(here.ctypes.data, here.nbytes)])
    peer = reader.connect(source.connection)
    peer.attach(shown.descriptor)
    rows = [(held.ctypes.data, here.ctypes.data, held.nbytes)]
    with closing(peer.prepare(np.array(rows, np.uint64))) as read:
        read.post()
        deadline = Deadline("transport='tcp'", TRY_S)
        while not read.is_done():
            deadline.check("a stream over loopback")
    if here.tobytes() != BYTES:
        raise OSError("other bytes came than were shown")
