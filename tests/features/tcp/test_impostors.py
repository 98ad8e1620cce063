"""Readers whose source is another process than its card says, or answers what no source would."""

import contextlib
import struct
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from features.tcp.hostile import KNOCK, MODES, Card, Ended, Line, Reader, Sealed, Tls
from features.tcp.impostor import Identity, Impostor
from kit import until
from p2p.steps import region

from torch_ros.errors import TransferFailed
from torch_ros.features.tcp.transport import TcpTransport
from torch_ros.spans import HOST

pytestmark = pytest.mark.timeout(60)

SIZE, MARGIN = 300_000, 4096
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()

modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return [Identity(folder) for _ in range(2)]


@pytest.fixture
def true():
    """A source, whose card impostors know."""
    made = TcpTransport()
    yield made
    made.close()


@pytest.fixture
def reader():
    made = TcpTransport(connect_s=3)
    yield made
    made.close()


def card_of(true, mode, **changed):
    """The card, but that readers have one way to go: near, if it says that their network is the
    source's, else by its address.
    """
    card, is_near = Card.read(true.connection), mode == "near"
    if not is_near:
        changed = {"network": card.network + 1, "addresses": [b"\x7f\0\0\1"], **changed}
    return card.but(**{"addresses": [], **changed})


def refused(reader, impostor):
    with pytest.raises(TransferFailed) as caught:
        reader.connect(impostor.card.encode())
    return str(caught.value)


def read_of(reader, impostor):
    """A read of all that the impostor has, and where it lands, with a margin around."""
    target = np.zeros(SIZE + 2 * MARGIN, np.uint8)
    inner = target[MARGIN : MARGIN + SIZE]
    reader.register([region(inner)])
    peer = reader.connect(impostor.card.encode())
    bounds = np.array([0, SIZE], np.uint64).tobytes()
    peer.attach(msgspec.msgpack.encode(("tcp", impostor.card.agent, [(b"i" * 16, HOST, bounds)])))
    read = peer.prepare(np.array([[0, inner.ctypes.data, SIZE]], np.uint64))
    return read, target


def is_bare(target):
    """Whether nothing has landed beside the target."""
    return not (target[:MARGIN].any() or target[-MARGIN:].any())


def own_card(true, mode, identity):
    """The card of a source that has this certificate."""
    return card_of(true, mode, pin=identity.pin)


# The trust of a reader


@modes
def test_a_source_by_the_page_is_read(true, reader, identities, mode):
    with Impostor(own_card(true, mode, identities[0]), identities[0], CONTENT) as impostor:
        read, target = read_of(reader, impostor)
        for _ in range(3):
            target[:] = 0
            read.post()
            until(read.is_done)
            assert target[MARGIN:-MARGIN].tobytes() == CONTENT
            assert is_bare(target)
        assert impostor.modes == [mode]


@modes
def test_who_has_the_token_and_another_certificate_is_refused(true, reader, identities, mode):
    """Whoever reads a model's keys knows the token."""
    with Impostor(card_of(true, mode), identities[0], CONTENT) as impostor:
        assert "certificate" in refused(reader, impostor)
        assert not impostor.heard


class Signing(Impostor):
    """Shows the true certificate, whose key it has not."""

    def __init__(self, card, certificate, signature):
        self.said = signature
        super().__init__(card, SimpleNamespace(certificate=certificate, key=None))

    def sign(self, nonces):
        return self.said(nonces)


def shown_by(true):
    """The certificate and a signature that a source shows to whoever knows its token."""
    found = []

    class Overhearing(Reader):
        def hear(self):
            self.theirs, _ = self.channel.take(32), self.channel.take(32)
            found.extend(map(self.channel.take, struct.unpack("<HH", self.channel.take(4))))
            return True

    with Overhearing(Card.read(true.connection)) as overhearing:
        overhearing.meet()
    return found


def test_who_lacks_the_key_of_the_certificate_is_refused_near(true, reader, identities):
    certificate, overheard = shown_by(true)
    own = Impostor(card_of(true, "near"), identities[0])
    for signature in (lambda _: overheard, lambda _: b"", lambda _: bytes(70), own.sign):
        with Signing(card_of(true, "near"), certificate, signature) as impostor:
            assert "key" in refused(reader, impostor)
            assert not impostor.heard
    own.__exit__()


class Proving(Impostor):
    """Shows a proof that is another one."""

    kind = None

    def proof(self, mode, *nonces):
        other = MODES[1 - MODES.index(mode)]
        card = self.card
        return {
            "none": bytes(32),
            "another token": card.but(token=bytes(32)).proof("source", mode, *nonces),
            "the reader's": card.proof("reader", mode, *nonces),
            "a knock's": card.proof("knock", mode, nonces[0]),
            "of the other mode": card.proof("source", other, *nonces),
            "of other nonces": card.proof("source", mode, *nonces[::-1]),
            "of another agent": card.but(agent="another").proof("source", mode, *nonces),
        }[self.kind]


@modes
def test_who_lacks_the_token_is_refused(true, reader, identities, mode):
    kinds = "none", "another token", "the reader's", "a knock's", "of the other mode"
    for kind in (*kinds, "of other nonces", "of another agent"):
        with Proving(own_card(true, mode, identities[0]), identities[0]) as impostor:
            impostor.kind = kind
            assert "token" in refused(reader, impostor), kind
            assert not impostor.heard, kind


class PassingOn(Impostor):
    """Meets the source under the other mode with what a reader says, without a token."""

    def __init__(self, card, to):
        super().__init__(card, None)
        self.to, self.got = to, []

    def meet(self, line):
        knock = line.take(KNOCK.size)
        number = KNOCK.unpack(knock)[2]
        for changed in (knock, knock[:6] + struct.pack("<H", 3 - number) + knock[8:]):
            with Reader(self.to, "tls" if number == 1 else "near") as there:
                there.nonce = KNOCK.unpack(knock)[3]
                there.knock(changed)
                with contextlib.suppress(Ended):
                    self.got.append(there.line.take(1))
                    channel = Tls(there.line)
                    channel.shake()
                    self.got.append(channel.take(64))
        raise Ended


def test_what_a_reader_says_near_opens_no_meeting_under_tls(true, reader):
    with PassingOn(card_of(true, "near"), Card.read(true.connection)) as impostor:
        refused(reader, impostor)
        assert impostor.got
        assert not [each for each in impostor.got if len(each) > 1]


class Forwarding(Impostor):
    """Is between the two, and changes a byte of what the source says, or adds one."""

    def __init__(self, card, to, number):
        super().__init__(card, None)
        self.to, self.number, self.seen = to, number, 0

    def serve(self, line):
        with Reader(self.to) as there:
            back = threading.Thread(target=self._copy, args=(line, there.line), daemon=True)
            back.start()
            while True:
                said = bytearray(there.line.some(1))
                if self.seen == self.number:
                    said[0] ^= 0x40
                self.seen += 1
                line.send(bytes(said))

    def _copy(self, source, target):
        with contextlib.suppress(Ended, OSError):
            while True:
                target.send(source.some(1 << 14))


def meeting_bytes(true, mode):
    """How many bytes a source sends in a meeting."""
    card = Card.read(true.connection)

    class Counting(Line):
        count = 0

        def some(self, size):
            found = super().some(size)
            self.count += len(found)
            return found

    with Reader(card, mode) as one:
        one.line.__class__ = Counting
        one.meet()
        return one.line.count


@pytest.mark.parametrize(
    ("mode", "step"),
    [
        ("near", 5),
        ("tls", 29),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("near", 1), ("tls", 7))),
    ],
)
def test_a_meeting_of_which_a_byte_is_changed_on_the_way_ends_in_no_connection(true, mode, step):
    card, whole = Card.read(true.connection), meeting_bytes(true, mode)
    accepted = []
    for number in range(1, whole, step):  # at 0 it says that it has no room
        with Forwarding(card_of(true, mode), card, number) as impostor:
            one = TcpTransport(connect_s=1 if mode == "tls" else 3)
            try:
                one.connect(impostor.card.encode())
                accepted += [number] if impostor.seen > number else []  # one is shorter
            except TransferFailed:
                pass
            finally:
                one.close()
    assert not accepted


# The bytes that a reader takes


class Answering(Impostor):
    """Answers otherwise, by `kind`."""

    kind = None

    def answer(self, channel, rows):
        match self.kind:
            case "status":
                channel.send(struct.pack("<Q", 2))
                channel.send(self.content)
            case "garbage":
                channel.send(b"\xff" * 8)
            case "short":
                channel.send(struct.pack("<Q", 0))
                channel.send(self.content[:1000])
                raise Ended
            case "nothing":
                raise Ended
            case "more":
                super().answer(channel, rows)
                channel.send(b"\xee" * 5000)


@modes
@pytest.mark.parametrize("kind", ["status", "garbage", "short", "nothing"])
def test_an_answer_that_is_none_is_a_failed_read(true, reader, identities, mode, kind):
    with Answering(own_card(true, mode, identities[0]), identities[0], CONTENT) as impostor:
        impostor.kind = kind
        read, target = read_of(reader, impostor)
        with pytest.raises(TransferFailed):
            read.post()
            until(read.is_done)
        read.close()
        assert is_bare(target)


@modes
def test_bytes_beyond_an_answer_land_nowhere_and_in_no_later_read(true, reader, identities, mode):
    with Answering(own_card(true, mode, identities[0]), identities[0], CONTENT) as impostor:
        impostor.kind = "more"
        read, target = read_of(reader, impostor)
        for _ in range(5):
            target[:] = 0
            try:
                read.post()
                until(read.is_done)
            except TransferFailed:
                pass
            else:
                assert target[MARGIN:-MARGIN].tobytes() == CONTENT
            assert is_bare(target)


class Spoiling(Impostor):
    """Seals well, and spoils a bit of it, or sends pieces in another order."""

    kind = None

    def answer(self, channel, rows):
        assert isinstance(channel, Sealed)
        sent, send = [], channel.line.send
        channel.line.send = sent.append
        super().answer(channel, rows)
        channel.line.send = send
        status, *pieces = sent
        if self.kind == "tag":
            pieces[-1] = pieces[-1][:-1] + bytes([pieces[-1][-1] ^ 1])
        elif self.kind == "byte":
            pieces[0] = bytes([pieces[0][0] ^ 1]) + pieces[0][1:]
        elif self.kind == "status":
            status = bytes([status[0] ^ 1]) + status[1:]
        send(b"".join((status, *pieces)))


@pytest.mark.parametrize("kind", ["tag", "byte", "status"])
def test_a_bit_that_is_changed_on_the_way_is_a_failed_read(true, reader, identities, kind):
    with Spoiling(own_card(true, "tls", identities[0]), identities[0], CONTENT) as impostor:
        impostor.kind = kind
        read, target = read_of(reader, impostor)
        with pytest.raises(TransferFailed):
            read.post()
            until(read.is_done)
        assert is_bare(target)


# Forged cards


def test_loopback_is_not_tried_for_a_card_of_another_host(true, reader, identities):
    forged = b"\x7f\0\0\1", b"\x7f\1\2\3", bytes(15) + b"\1", bytes(10) + b"\xff\xff\x7f\0\0\1"
    for address in (*forged, bytes(4), bytes(16), b"\xe0\0\0\1", b"\xa9\xfe\1\1"):
        card = card_of(true, "near", boot="another", pin=identities[0].pin)
        with Impostor(card, identities[0]) as impostor:
            impostor.card = impostor.card.but(addresses=[address])
            assert "address" in refused(reader, impostor)
            assert not impostor.open


def forged_cards(card):
    good = msgspec.msgpack.decode(card.encode())
    wrong = (None, True, -1, 0, 1 << 63, 1.5, "", "x" * 5000, b"", bytes(33), [], [b""], {"a": 1})
    for place in range(len(good)):
        for other in wrong:
            yield msgspec.msgpack.encode([*good[:place], other, *good[place + 1 :]])
    yield card.but(addresses=[bytes([10, 0, 0, n]) for n in range(9)]).encode()
    yield from (card.but(addresses=[bytes(size)]).encode() for size in (1, 5, 15, 17))
    yield from (card.but(port=port).encode() for port in (0, -1, 65536))
    yield from (card.encode()[:size] for size in range(len(card.encode())))
    yield card.encode() + b"\0"


def test_forged_cards_are_a_failed_transfer_and_nothing_else(true, identities):
    reader = TcpTransport(connect_s=0.3)
    card = Card.read(true.connection)
    for forged in forged_cards(card):
        with contextlib.suppress(TransferFailed):  # what was changed may be of no importance
            peer = reader.connect(forged)
            assert peer.agent == card.agent
            peer.close()
    reader.close()


def test_a_port_that_swallows_all_is_given_up_in_time(true, identities):
    class Mute(Impostor):
        def serve(self, line):
            line.rest()

    for mode in MODES:
        with Mute(card_of(true, mode), identities[0]) as impostor:
            reader = TcpTransport(connect_s=0.5)
            assert "answer" in refused(reader, impostor)
            reader.close()
