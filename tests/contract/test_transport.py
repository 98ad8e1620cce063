"""What every transport promises: the one in memory, NIXL over UCX, and copies of shared memory."""

import fcntl
import mmap
import os
import sys
import threading
import uuid

import numpy as np
import pytest
from kit import until
from p2p.steps import attached, region

from torch_ros.errors import ClosedError, NotSupported, TransferFailed, UsageError
from torch_ros.features.fabrics.ways import WaysTransport  # feature fabrics
from torch_ros.memory.transport import MemoryTransport
from torch_ros.spans import Region

DEADLINE_S = 20

# In this process both kinds of transport know at once that a peer has closed; NIXL's UCX notices
# it a moment later.
NOTICE_S = 10


KINDS = ["memory", "nixl", "closed"]
KINDS += ["shared", "cma", "kernel"]  # feature shortcuts
KINDS += ["fabric"]  # feature fabrics
# feature fabrics {
KINDS += ["beyond"]  # feature tcp
# } fabrics
KINDS += ["tcp", "tcp-near", "tcp-device", "tcp-near-device"]  # feature tcp
# feature shortcuts {
KINDS += ["tcp-cma"]  # feature tcp
# } shortcuts


# Each of these is made of parts of others, which `make test` has.
LATER = {"nixl", "cma", "beyond", "tcp-device", "tcp-cma"}
EACH = [pytest.param(kind, marks=pytest.mark.long if kind in LATER else ()) for kind in KINDS]


@pytest.fixture(params=EACH)
def make(request, monkeypatch):
    """Makes a transport; closes them all in the end."""
    made = []
    # feature shortcuts {
    if request.param in ("shared", "cma", "kernel", "tcp-cma"):
        from torch_ros.features.shortcuts import copying, peer
        from torch_ros.features.shortcuts import transport as shortcuts

        for module, least in ((peer, "LOOK_BYTES"), (copying, "SHARE_BYTES")):
            monkeypatch.setattr(module, least, 1)
    # } shortcuts
    if request.param == "shared":
        monkeypatch.setattr(sys.modules[__name__], "random_bytes", random_shared_bytes)

    def transport(*args):
        if request.param == "memory":
            made.append(MemoryTransport(*args))
        # feature tcp {
        elif request.param in ("tcp", "tcp-near"):
            from torch_ros.features.tcp.transport import TcpTransport

            made.append(TcpTransport(*args, **elsewhere(request.param, len(made))))
        elif request.param in ("tcp-device", "tcp-near-device"):
            from features.tcp.devices import Devices, OnDevice

            from torch_ros.features.tcp.transport import TcpTransport

            where = elsewhere(request.param.removesuffix("-device"), len(made))
            made.append(OnDevice(TcpTransport(*args, crossing=(on := Devices()), **where), on))
        # feature shortcuts {
        elif request.param == "tcp-cma":
            from torch_ros.features.tcp.transport import TcpTransport

            made.append(TcpTransport(*args))
            made.append(shortcuts.ShortcutTransport(made[-1], threads=2))
            made[-1].never = 0  # here both ends are one process
        # } shortcuts
        # } tcp
        elif request.param in ("fabric", "beyond"):
            made.append(
                two_ways(*args, fabric="f" if request.param == "fabric" else str(len(made)))
            )
        # feature shortcuts {
        elif request.param == "kernel":
            from features.shortcuts.steps import Refusing

            made.append(shortcuts.ShortcutTransport(Refusing(), threads=2))
            made[-1].never = 0  # here both ends are one process
        # } shortcuts
        else:
            from torch_ros.p2p.nixl import NixlTransport

            made.append(NixlTransport(*args, is_closed=request.param == "closed"))
            # feature shortcuts {
            if request.param in ("shared", "cma"):
                threads = 2 if request.param == "cma" else 0
                made.append(shortcuts.ShortcutTransport(made[-1], threads=threads))
                made[-1].never = 0  # here both ends are one process
            # } shortcuts
        return made[-1]

    yield transport
    for each in reversed(made):
        each.close()


def two_ways(agent=None, *, fabric):
    """One that shares memory within its fabric, and takes our own TCP to all others."""
    from torch_ros.p2p.nixl import NixlTransport

    agent = agent or str(uuid.uuid4())
    ways = [("nixl", NixlTransport(agent))]
    # feature tcp {
    from torch_ros.features.tcp.transport import TcpTransport

    ways.append(("tcp", TcpTransport(agent)))
    # } tcp
    return WaysTransport(fabric, ways)


# feature tcp {
def elsewhere(kind, number):
    """For "tcp", loopbacks that are not the same one: all is sealed."""
    from torch_ros.channels.addresses import Listen, place

    return (
        {"listen": Listen(("127.0.0.1",)), "place": (place()[0], number)} if kind == "tcp" else {}
    )


# } tcp
@pytest.fixture
def pair(make):
    """A source and a reader."""
    return make(), make()


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def random_shared_bytes(size, seed=0):
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    memory = np.frombuffer(mmap.mmap(fd, size), np.uint8)  # which keeps the file open
    os.close(fd)
    memory[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return memory


def span(source, target, *, at=0, to=0, size=None):
    return (
        source.ctypes.data + at,
        target.ctypes.data + to,
        source.nbytes if size is None else size,
    )


def spans(*rows):
    return np.array(rows, np.uint64)


def run(read):
    read.post()
    until(read.is_done, DEADLINE_S, pause_s=0.0001)


def fetch(peer, *rows):
    """One read, from prepare to close."""
    read = peer.prepare(spans(*rows))
    try:
        assert read.size_bytes == sum(row[2] for row in rows)
        run(read)
    finally:
        read.close()


def test_a_region_of_any_size_arrives(pair):
    for size in (1, 2, 511, 4096, 65537, 1 << 20, 8 << 20):
        source, target = random_bytes(size), np.zeros(size, np.uint8)
        peer, shown = attached(*pair, source)
        landing = pair[1].register([region(target)])
        fetch(peer, span(source, target))
        assert (target == source).all(), size
        for each in (peer, landing, shown):
            each.close()


def test_many_spans_land_where_they_should_and_nowhere_else(pair):
    source, target = random_bytes(1 << 20), np.zeros(2 << 20, np.uint8)
    peer, _ = attached(*pair, source)
    pair[1].register([region(target)])
    starts = np.random.default_rng(1).permutation(1 << 10) * 1024
    rows = [
        span(source, target, at=s, to=2 * s, size=1 + s // 1024 % 1024) for s in starts.tolist()
    ]
    fetch(peer, *rows)
    expected = np.zeros_like(target)
    for start in starts.tolist():
        size = 1 + start // 1024 % 1024
        expected[2 * start : 2 * start + size] = source[start : start + size]
    assert (target == expected).all()


def test_spans_may_read_the_same_bytes_twice(pair):
    source, target = random_bytes(4096), np.zeros(8192, np.uint8)
    peer, _ = attached(*pair, source)
    pair[1].register([region(target)])
    fetch(peer, span(source, target), span(source, target, to=4096))
    assert (target.reshape(2, -1) == source).all()


def test_a_read_posted_again_sees_what_was_written_meanwhile(pair):
    source, target = random_bytes(70_000), np.zeros(70_000, np.uint8)
    peer, _ = attached(*pair, source)
    pair[1].register([region(target)])
    read = peer.prepare(spans(span(source, target)))
    for seed in (1, 2, 3):
        source[:] = random_bytes(source.size, seed)
        run(read)
        assert (target == source).all()
    read.close()


def test_regions_that_touch_can_be_read_in_one_span(pair):
    source, target = random_bytes(3000), np.zeros(3000, np.uint8)
    halves = [source[:1000], source[1000:1500], source[1500:]]
    peer, _ = attached(*pair, *halves[::-1])
    pair[1].register([region(target[2000:]), region(target[:2000])])
    fetch(peer, span(source, target))
    assert (target == source).all()


def test_a_span_may_cross_from_one_registration_to_the_next(pair):
    source, target = random_bytes(3000), np.zeros(3000, np.uint8)
    peer, _ = attached(*pair, source[:1200])
    peer.attach(pair[0].register([region(source[1200:])]).descriptor)
    for part in (target[:500], target[500:]):
        pair[1].register([region(part)])
    fetch(peer, span(source, target))
    assert (target == source).all()


def test_regions_of_one_registration_may_overlap(pair):
    source, target = random_bytes(4000), np.zeros(4000, np.uint8)
    peer, _ = attached(*pair, source[:3000], source[1000:2000], source[2500:], source[:1])
    pair[1].register([region(target)])
    fetch(peer, span(source, target))
    assert (target == source).all()


def test_registrations_may_overlap_and_close_in_any_order(pair):
    source, target = random_bytes(4000), np.zeros(4000, np.uint8)
    peer, whole = attached(*pair, source)
    inner, same = (pair[0].register([region(part)]) for part in (source[1000:2000], source))
    for registration in (inner, same):
        peer.attach(registration.descriptor)
    mine = [pair[1].register([region(part)]) for part in (target, target[3000:3100], target)]
    for closing in (mine[0], whole, mine[1], inner):
        target[:] = 0
        # Beyond the smaller one, which lies inside the larger.
        fetch(
            peer, span(source, target, at=1990, to=3090, size=900), span(source, target, size=3000)
        )
        assert (target[:3000] == source[:3000]).all()
        assert (target[3090:3990] == source[1990:2890]).all()
        closing.close()
    fetch(peer, span(source, target))
    assert (target == source).all()


def test_memory_that_is_registered_anew_is_read_anew(pair):
    source, target = random_bytes(4000), np.zeros(4000, np.uint8)
    pair[1].register([region(target)])
    peer, registration = attached(*pair, source)
    for seed in range(5):
        registration.close()
        source[:] = random_bytes(4000, seed)
        registration = pair[0].register([region(source)])
        peer.attach(registration.descriptor)
        fetch(peer, span(source, target))
        assert (target == source).all()


def test_attaching_twice_is_attaching_once(pair):
    source, target = random_bytes(4000), np.zeros(4000, np.uint8)
    peer, registration = attached(*pair, source)
    peer.attach(registration.descriptor)
    pair[1].register([region(target)])
    fetch(peer, span(source, target))
    assert (target == source).all()


def test_a_registration_after_the_connection_can_be_attached(pair):
    peer = pair[1].connect(pair[0].connection)
    target = np.zeros(6000, np.uint8)
    pair[1].register([region(target)])
    for seed in range(3):
        source = random_bytes(6000, seed)
        peer.attach(pair[0].register([region(source)]).descriptor)
        fetch(peer, span(source, target))
        assert (target == source).all()


def test_connection_bytes_do_not_depend_on_registrations(pair):
    before = pair[0].connection
    source = np.zeros(1 << 20, np.uint8)
    pair[0].register([region(source[i : i + 512]) for i in range(0, source.size, 1024)])
    assert pair[0].connection == before
    assert len(before) < 4096


def test_nothing_can_be_registered_and_attached(pair):
    registration = pair[0].register([])
    assert registration.descriptor == b""
    pair[1].connect(pair[0].connection).attach(registration.descriptor)
    registration.close()


def test_memory_that_is_not_attached_cannot_be_read(pair):
    source, target = random_bytes(4000), np.zeros(4000, np.uint8)
    peer, _ = attached(*pair, source[1000:2000])
    pair[0].register([region(source)])  # registered, but this peer was not told
    pair[1].register([region(target)])
    for at, size in ((0, 10), (990, 20), (1990, 20), (2000, 1), (0, 4000)):
        with pytest.raises(TransferFailed, match="attached"):
            peer.prepare(spans(span(source, target, at=at, size=size)))
    with pytest.raises(TransferFailed):
        peer.prepare(spans(span(source, target, at=1000, size=9), span(source, target, size=9)))
    fetch(peer, span(source, target, at=1000, size=1000))
    assert (target[:1000] == source[1000:2000]).all()


def test_nothing_lands_in_memory_that_is_not_registered(pair):
    source, target = random_bytes(4000), np.zeros(4000, np.uint8)
    peer, _ = attached(*pair, source)
    pair[1].register([region(target[1000:2000])])
    for to, size in ((0, 10), (990, 20), (1990, 20), (2000, 1), (0, 4000)):
        with pytest.raises(TransferFailed, match="registered"):
            peer.prepare(spans(span(source, target, to=to, size=size)))
    assert not target.any()


def test_a_target_that_was_unregistered_is_not_written(pair):
    source, target = random_bytes(4000), np.zeros(4000, np.uint8)
    peer, _ = attached(*pair, source)
    registration = pair[1].register([region(target)])
    read = peer.prepare(spans(span(source, target)))
    registration.close()
    registration.close()
    with pytest.raises(TransferFailed):
        read.post()
    with pytest.raises(TransferFailed):
        peer.prepare(spans(span(source, target)))
    read.close()
    assert not target.any()


def test_empty_regions_and_spans_are_mistakes(pair):
    source, target = random_bytes(10), np.zeros(10, np.uint8)
    with pytest.raises(UsageError):
        pair[0].register([region(source), Region(source.ctypes.data, 0)])
    peer, _ = attached(*pair, source)
    pair[1].register([region(target)])
    for rows in (spans(span(source, target, size=0)), np.zeros((0, 3), np.uint64)):
        with pytest.raises(UsageError):
            peer.prepare(rows)


def test_other_bytes_than_connection_bytes_are_refused(pair):
    source, reader = pair
    good = source.connection
    descriptor = source.register([region(np.zeros(100, np.uint8))]).descriptor
    for bad in (b"", b"garbage", good[:-1], good[1:], bytes(500), descriptor):
        with pytest.raises(TransferFailed):
            reader.connect(bad)
    with pytest.raises(TransferFailed):
        source.connect(good)
    reader.connect(good)


def test_other_bytes_than_descriptors_of_the_peer_are_refused(make, pair):
    source, target = random_bytes(100), np.zeros(100, np.uint8)
    peer, registration = attached(*pair, source)
    good, foreign = registration.descriptor, make().register([region(source)]).descriptor
    for bad in (
        b"garbage",
        good[: len(good) // 2] + b"\0/-1",
        good[1:],
        bytes(500),
        foreign,
        pair[0].connection,
    ):
        with pytest.raises(TransferFailed):
            peer.attach(bad)
    pair[1].register([region(target)])
    fetch(peer, span(source, target))
    assert (target == source).all()


def test_two_transports_read_from_each_other(pair):
    ours = [random_bytes(50_000, seed) for seed in (1, 2)]
    theirs = [np.zeros(50_000, np.uint8) for _ in range(2)]
    for index, (me, other) in enumerate((pair, pair[::-1])):
        me.register([region(theirs[index])])
        peer, _ = attached(other, me, ours[1 - index])
        fetch(peer, span(ours[1 - index], theirs[index]))
    assert (theirs[0] == ours[1]).all()
    assert (theirs[1] == ours[0]).all()


def test_one_reader_has_several_peers(make):
    reader, target = make(), np.zeros(3000, np.uint8)
    reader.register([region(target)])
    sources = [random_bytes(1000, seed) for seed in range(3)]
    peers = [attached(make(), reader, source)[0] for source in sources]
    assert len({peer.agent for peer in peers}) == 3
    for index, (peer, source) in enumerate(zip(peers, sources, strict=True)):
        fetch(peer, span(source, target, to=1000 * index))
    assert (target == np.concatenate(sources)).all()


def test_two_threads_read_from_two_peers_at_once(make):
    reader, failures = make(), []

    def read(transport, seed):
        try:
            source, target = random_bytes(1 << 20, seed), np.zeros(1 << 20, np.uint8)
            registration = reader.register([region(target)])
            peer, _ = attached(transport, reader, source)
            for _ in range(50):
                target[:] = 0
                fetch(peer, span(source, target))
                assert (target == source).all()
            peer.close()
            registration.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(make(), seed)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_peer_can_be_connected_again_after_its_close(pair):
    source, target = random_bytes(1000), np.zeros(1000, np.uint8)
    pair[1].register([region(target)])
    for _ in range(3):
        target[:] = 0
        peer, registration = attached(*pair, source)
        fetch(peer, span(source, target))
        assert (target == source).all()
        registration.close()
        peer.close()
        peer.close()


def test_a_peer_connected_twice_outlives_the_first_close(pair):
    source, target = random_bytes(1000), np.zeros(1000, np.uint8)
    pair[1].register([region(target)])
    first, registration = attached(*pair, source)
    second = pair[1].connect(pair[0].connection)
    assert first.agent == second.agent == pair[0].agent
    second.attach(registration.descriptor)
    first.close()
    with pytest.raises(ClosedError):
        first.prepare(spans(span(source, target)))
    with pytest.raises(ClosedError):
        first.attach(registration.descriptor)
    fetch(second, span(source, target))
    assert (target == source).all()


def test_a_closed_read_stays_closed(pair):
    source, target = random_bytes(1000), np.zeros(1000, np.uint8)
    peer, _ = attached(*pair, source)
    pair[1].register([region(target)])
    read = peer.prepare(spans(span(source, target)))
    read.close()
    read.close()
    with pytest.raises(ClosedError):
        read.post()
    assert not target.any()


def test_a_read_ends_with_the_transport_that_made_it(pair):
    source, target = random_bytes(1000), np.zeros(1000, np.uint8)
    peer, _ = attached(*pair, source)
    pair[1].register([region(target)])
    read = peer.prepare(spans(span(source, target)))
    pair[1].close()
    with pytest.raises(TransferFailed):
        read.post()
    read.close()
    peer.close()
    for call in (
        lambda: peer.prepare(spans(span(source, target))),
        lambda: peer.attach(b""),
        lambda: pair[1].register([region(source)]),
        lambda: pair[1].connect(pair[0].connection),
    ):
        with pytest.raises(ClosedError):
            call()
    pair[1].close()


def test_a_source_that_closed_is_noticed(pair):
    source, target = random_bytes(1000), np.zeros(1000, np.uint8)
    peer, registration = attached(*pair, source)
    pair[1].register([region(target)])
    read = peer.prepare(spans(span(source, target)))
    run(read)
    pair[0].close()
    registration.close()
    with pytest.raises(TransferFailed):
        until(lambda: run(read), NOTICE_S, pause_s=0.01)
    read.close()
    peer.close()
    with pytest.raises(TransferFailed):
        pair[1].connect(pair[0].connection)


def test_gpu_memory_is_refused_in_memory():
    with pytest.raises(NotSupported):
        MemoryTransport().register([Region(4096, 10, 0)])
