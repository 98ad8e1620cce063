"""Two ends meet over pipes of which an enemy sees and changes every byte."""

import hashlib
import itertools
from copy import copy
from datetime import UTC, datetime, timedelta

import pytest
from channels.ends import End, pair, run
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from torch_ros.channels import wire
from torch_ros.channels.meeting import (
    Full,
    PlainChannel,
    SealedChannel,
    TcpIdentity,
    accept,
    greet,
)
from torch_ros.channels.views import PieceBuffers
from torch_ros.channels.wire import NEAR, SEALED, Garbage, TcpCard

IDENTITY = TcpIdentity()
BUFFERS = PieceBuffers(wire.PIECE_BYTES + 64)
MODES = pytest.mark.parametrize("mode", [NEAR, SEALED])


def card(pin=IDENTITY.pin, token=IDENTITY.token, agent="a"):
    return TcpCard("tcp", agent, "boot", 7, 7000, (), pin, token)


def source(sock, identity=IDENTITY, welcome=lambda _: True):
    return accept(sock, identity, "a", BUFFERS, welcome)


def reader(sock, mode, **other):
    return greet(sock, card(**other), mode, BUFFERS)


def met(mode):
    there, here = pair()
    answers = run(source(there), reader(here, mode))
    assert not any(isinstance(each, Exception) for each in answers), answers
    return answers


@MODES
def test_two_that_know_the_token_meet_and_talk(mode):
    there, here = met(mode)
    for size in (1, 8, 70_000, wire.PIECE_BYTES):
        body = bytes(size % 251 for size in range(size))
        _, heard = run(there.send(body), here.receive(size))
        assert heard == body
        _, heard = run(here.send(body[:9], body[9:]), there.receive(size))
        assert heard == body


def test_what_is_sealed_shows_nothing():
    there, here = met(SEALED)
    there.sock.said = b""
    run(there.send(b"weights" * 100), here.receive(700))
    assert b"weights" not in there.sock.said
    assert len(there.sock.said) == 716


@MODES
def test_another_token_opens_nothing(mode):
    there, here = pair()
    answers = run(source(there), reader(here, mode, token=bytes(32)))
    assert isinstance(answers[0], Garbage)
    assert there.said == b""  # nothing was shown, and no key was used


@MODES
def test_another_certificate_is_refused(mode):
    other = TcpIdentity()
    other.token = IDENTITY.token
    there, here = pair()
    answers = run(source(there, other), reader(here, mode, pin=other.pin[::-1]))
    assert isinstance(answers[0], Garbage)


@MODES
def test_a_source_with_another_certificate_is_told_nothing(mode):
    """It knows the token, but has not the key of the card's certificate."""
    other = TcpIdentity()
    other.token, other.pin = IDENTITY.token, IDENTITY.pin
    there, here = pair()
    answers = run(source(there, other), reader(here, mode))
    assert isinstance(answers[1], Garbage)
    assert "certificate" in str(answers[1])


def test_a_certificate_of_the_card_without_its_key_is_refused():
    other = TcpIdentity()
    other.token, other.pin, other.certificate = (
        *(IDENTITY.token, IDENTITY.pin, IDENTITY.certificate),
    )
    there, here = pair()
    answers = run(source(there, other), reader(here, NEAR))
    assert "key of its certificate" in str(answers[1])


@MODES
def test_another_agent_is_refused(mode):
    there, here = pair()
    assert isinstance(run(source(there), reader(here, mode, agent="b"))[0], Garbage)


@MODES
def test_a_full_source_says_so(mode):
    there, here = pair()
    answers = run(source(there, welcome=lambda _: False), reader(here, mode))
    assert isinstance(answers[1], Full)


def test_what_is_said_in_one_mode_proves_nothing_in_the_other():
    """A stranger passes a reader's plain words on, within TLS of its own, and gets no key."""
    there, here = pair()
    knock = wire.knock(NEAR, bytes(32), IDENTITY.token, IDENTITY.pin, "a")
    turned = bytearray(knock)
    turned[6] = SEALED
    stranger = iter([here.send(bytes(turned))])
    assert next(stranger)
    assert isinstance(run(source(there))[0], Garbage)


class Enemy(End):
    """Passes on what the other end sends, and changes it."""

    def __init__(self, sends, receives, change):
        super().__init__(sends, receives)
        self.change = change

    def send(self, body, flags=0):
        for changed in self.change(bytes(body)):
            self.sends.append(changed)
        return len(body)


def between(mode, to_reader=None, to_source=None):
    """The ends' answers where an enemy changes what one of them is sent."""
    there, here = pair()
    if to_reader:
        there = Enemy(there.sends, there.receives, to_reader)
    if to_source:
        here = Enemy(here.sends, here.receives, to_source)
    return run(source(there), reader(here, mode), rounds=50)


def flip_at(place, bit):
    """A change of one bit of a stream."""
    seen = itertools.count()

    def change(body):
        changed = bytearray(body)
        for index in range(len(changed)):
            if next(seen) == place:
                changed[index] ^= bit
        yield bytes(changed)

    return change


def length_of(mode, side):
    there, here = pair()
    run(source(there), reader(here, mode))
    return len((there, here)[side].said)


@MODES
@pytest.mark.parametrize("side", [0, 1])
def test_no_flipped_bit_of_a_meeting_makes_two_that_trust_each_other(mode, side):
    for place in range(0, length_of(mode, side), 7):
        change = {("to_reader", "to_source")[side]: flip_at(place, 1 << place % 8)}
        answers = between(mode, **change)
        # A signature's or certificate's length differs by a byte from meeting to meeting.
        is_beyond = place >= length_of(mode, side) - 16
        if not is_beyond:
            assert any(isinstance(each, Exception) for each in answers), place


@MODES
@pytest.mark.parametrize("side", [0, 1])
def test_a_meeting_that_is_cut_short_is_none(mode, side):
    for keep in range(0, length_of(mode, side) - 16, 5):
        left = [keep]

        def cut(body, left=left):
            some, left[0] = body[: left[0]], max(0, left[0] - len(body))
            if some:
                yield some

        answers = between(mode, **{("to_reader", "to_source")[side]: cut})
        assert any(isinstance(each, Exception) for each in answers), keep


@MODES
def test_a_meeting_played_again_proves_nothing(mode):
    there, here = pair()
    run(source(there), reader(here, mode))
    said = here.said
    again, stranger = pair()
    stranger.send(said)
    stranger.close()
    [answer] = run(source(again))
    assert isinstance(answer, OSError)


@MODES
def test_a_reader_that_is_shown_its_own_words_refuses_them(mode):
    there, here = pair()
    there.send(wire.WELCOME)
    steps = reader(here, mode)
    assert next(steps)
    there.send(here.said)
    there.close()
    [answer] = run(steps)
    assert isinstance(answer, OSError)


def test_a_stranger_who_never_ends_tls_is_ended():
    there, here = pair()
    here.send(wire.knock(SEALED, bytes(32), IDENTITY.token, IDENTITY.pin, "a"))
    hello = b"\x16\x03\x01\x40\x00" + b"\x01\x00\x3f\xfc" + bytes(0x3FFC)
    for _ in range(6):
        here.send(hello)
    [answer] = run(source(there))
    assert isinstance(answer, OSError)


def sealed_pair():
    there, here = pair()
    keys = bytes(range(32)), bytes(32)
    return SealedChannel(there, *keys, BUFFERS), SealedChannel(here, *keys[::-1], BUFFERS)


@pytest.mark.parametrize("place", range(26))
def test_a_piece_with_a_flipped_bit_is_refused(place):
    there, here = sealed_pair()
    enemy = Enemy(there.sock.sends, there.sock.receives, flip_at(place, 1))
    there.sock = enemy
    assert isinstance(run(there.send(b"0123456789"), here.receive(10))[1], Garbage)


def test_pieces_in_another_order_are_refused():
    there, here = sealed_pair()
    run(there.send(b"a" * 10), there.send(b"b" * 10))
    here.sock.receives.rotate(1)
    assert isinstance(run(here.receive(10))[0], Garbage)


def test_a_piece_played_again_is_refused():
    there, here = sealed_pair()
    run(there.send(b"a" * 10))
    here.sock.receives.append(here.sock.receives[0])
    assert run(here.receive(10)) == [b"a" * 10]
    assert isinstance(run(here.receive(10))[0], Garbage)


def test_a_piece_sent_back_is_refused():
    there, here = sealed_pair()
    run(there.send(b"a" * 10))
    there.sock.receives.append(here.sock.receives[0])
    assert isinstance(run(there.receive(10))[0], Garbage)


def test_a_piece_lands_in_several_views():
    there, here = sealed_pair()
    body = bytes(range(200))
    targets = [bytearray(size) for size in (1, 150, 49)]
    run(there.send(body), here.fill([memoryview(each) for each in targets]))
    assert b"".join(targets) == body


def test_a_certificate_with_a_key_of_another_kind_is_no_source():
    key, nobody = ed25519.Ed25519PrivateKey.generate(), x509.Name([])
    made = x509.CertificateBuilder(nobody, nobody, key.public_key(), 1)
    now = datetime.now(UTC)
    made = made.not_valid_before(now).not_valid_after(now + timedelta(1))
    other = copy(IDENTITY)
    other.certificate = made.sign(key, None).public_bytes(serialization.Encoding.DER)
    other.pin = hashlib.sha256(other.certificate).digest()
    there, here = pair()
    answers = run(source(there, other), reader(here, NEAR, pin=other.pin))
    assert isinstance(answers[1], Garbage)


def test_what_else_answers_a_knock_is_not_a_source_without_room():
    there, here = pair()
    _, answer = run(PlainChannel(there).send(b"SSH-2.0"), reader(here, NEAR))
    assert isinstance(answer, Garbage)
    assert "something else" in str(answer)
