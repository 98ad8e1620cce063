"""Whoever reaches a source's port, with or without its card, gets what is registered or nothing.

TORCH_ROS_FUZZ=n tries n times as much. Requests by chance are in test_fuzz.py, crowds in
test_crowds.py.
"""

import contextlib
import ipaddress
import os
import random
import secrets
import socket
import struct

import pytest
from features.tcp.hostile import (
    BYTES_MAX,
    MODES,
    ROW,
    ROWS_MAX,
    CutShort,
    Ended,
    Reader,
)

pytestmark = pytest.mark.timeout(120)

TIMES = int(os.environ.get("TORCH_ROS_FUZZ", "1"))
SIZES = [70_001, 5000, 3 << 20]
WRAP = 1 << 64

modes = pytest.mark.parametrize("mode", MODES)


def is_refused(reader):
    """Whether the source ends the connection, and says nothing before it does."""
    return reader.rest() == b""


# The meeting


@modes
def test_a_reader_that_speaks_as_the_page_says_gets_the_bytes_of_all_its_rows(source, mode):
    (name, start, size), (other, there, _), _ = source.regions
    with source.reader(mode) as reader:
        assert reader.read((name, start, size)) == source.pattern(0).tobytes()
        expected = source.pattern(0)[7:20].tobytes() + source.pattern(1)[9:10].tobytes()
        assert reader.read((name, start + 7, 13), (other, there + 9, 1)) == expected
        rows = [(name, start + at, 1 + at % 3) for at in range(ROWS_MAX)]
        expected = b"".join(source.pattern(0)[at : at + 1 + at % 3] for at in range(ROWS_MAX))
        assert reader.read(*rows) == expected


def wrong_knocks(card, mode):
    """Knocks that lack the token, or were made for something else."""
    nonce, other = secrets.token_bytes(32), MODES[1 - MODES.index(mode)]
    good, number = card.knock(mode, nonce), MODES.index(mode) + 1
    yield from (bytes(72), secrets.token_bytes(72), good[:71] + bytes([good[71] ^ 1]))
    yield good[:8] + bytes([good[8] ^ 1]) + good[9:]  # its nonce
    yield from (card.knock(mode, nonce, magic=b"TROX"), card.knock(mode, nonce, form=2))
    yield from (card.knock(mode, nonce, number=n) for n in (0, 3 - number, 3, 0xFFFF))
    yield card.knock(other, nonce, number=number)
    yield from (card.but(**wrong).knock(mode, nonce) for wrong in wrong_fields(card))


def wrong_fields(card):
    """Changes of which each makes another card of it."""
    return {"token": bytes(32)}, {"pin": bytes([card.pin[0] ^ 1]) + card.pin[1:]}, {"agent": "x"}


@modes
def test_who_cannot_knock_is_shown_nothing(source, mode):
    for knock in wrong_knocks(source.card, mode):
        with Reader(source.card, mode) as reader:
            reader.knock(knock)
            assert is_refused(reader), knock


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"TROS"])
def test_what_speaks_another_language_is_shown_nothing(source, first):
    with Reader(source.card) as reader:
        reader.line.send(first.ljust(72, b"\0"))
        assert is_refused(reader)


def test_nobody_is_near_who_does_not_come_by_loopback(source):
    """Somebody between two hosts that have the same names could else read and change bytes."""
    hosts = [str(ipaddress.ip_address(address)) for address in source.card.addresses]
    if not hosts:
        pytest.skip("this host has no address but loopback")
    for host in hosts:
        with Reader(source.card, "tls", host=host).meet() as reader:
            assert reader.read(source.regions[1]) == source.pattern(1).tobytes()
        with Reader(source.card, "near", host=host) as reader:
            reader.knock()
            assert is_refused(reader)


@modes
def test_an_overheard_knock_opens_no_more_than_a_meeting(source, mode):
    """Under TLS, and near: the rest needs the token, and cannot be what was overheard."""
    with source.reader(mode) as overheard:
        knock = source.card.knock(mode, overheard.nonce)
        proof = source.card.proof("reader", mode, overheard.nonce, overheard.theirs)
    for said in (proof, bytes(32)):
        with Reader(source.card, mode) as reader:
            reader.nonce = overheard.nonce
            reader.knock(knock)
            assert reader.is_welcome()
            assert reader.hear()
            assert reader.theirs != overheard.theirs
            reader.prove(said)
            with contextlib.suppress(Ended):
                reader.ask(source.regions[0])
            assert is_refused(reader)


def met_but_unproven(source, mode):
    reader = Reader(source.card, mode)
    reader.knock()
    assert reader.is_welcome()
    assert reader.hear()
    return reader


def wrong_proofs(reader):
    """Proofs that lack the token, or were made for something else."""
    card, mode = reader.card, reader.mode
    nonces = reader.nonce, reader.theirs
    other_mode = MODES[1 - MODES.index(mode)]
    good = card.proof("reader", mode, *nonces)
    yield "none", bytes(32)
    yield "one bit", good[:-1] + bytes([good[-1] ^ 1])
    yield "the source's own", reader.heard
    yield "for the other mode", card.proof("reader", other_mode, *nonces)
    yield "with nonces exchanged", card.proof("reader", mode, *nonces[::-1])
    yield "without my nonce", card.proof("reader", mode, reader.theirs)
    yield "without its nonce", card.proof("reader", mode, reader.nonce)
    yield "with another nonce of mine", card.proof("reader", mode, bytes(32), reader.theirs)
    yield "with another nonce of its", card.proof("reader", mode, reader.nonce, bytes(32))
    yield "of a knock", card.proof("knock", mode, *nonces)
    yield "the knock's", card.proof("knock", mode, reader.nonce)
    for wrong in wrong_fields(card):
        yield f"another {next(iter(wrong))}", card.but(**wrong).proof("reader", mode, *nonces)


@modes
def test_a_proof_that_is_not_the_right_one_is_refused(source, mode):
    with met_but_unproven(source, mode) as reader:
        kinds = [kind for kind, _ in wrong_proofs(reader)]
    for kind in kinds:
        with met_but_unproven(source, mode) as reader:
            reader.prove(dict(wrong_proofs(reader))[kind])
            with contextlib.suppress(Ended):
                reader.ask(source.regions[0])
            assert is_refused(reader), kind


@modes
def test_two_meetings_have_no_nonce_or_key_in_common(source, mode):
    seen = set()
    for _ in range(20):
        with met_but_unproven(source, mode) as reader:
            seen.add(reader.theirs)
            if mode == "tls":
                seen.update(reader.channel.keys)
    assert len(seen) == 20 * (3 if mode == "tls" else 1)


def test_a_sealed_piece_that_was_changed_moved_or_repeated_ends_the_connection(source):
    def changed(pieces):
        return [pieces[0], bytes([pieces[1][0] ^ 1]) + pieces[1][1:]]

    def tag_changed(pieces):
        return [pieces[0], pieces[1][:-1] + bytes([pieces[1][-1] ^ 1])]

    kinds = [changed, tag_changed, lambda p: p[::-1], lambda p: [p[0], p[0]], lambda p: [p[1]]]
    for kind in kinds:
        with source.reader("tls") as reader:
            seal = reader.channel.seal
            pieces = [seal(struct.pack("<II", 1, 0)), seal(ROW.pack(*source.regions[1]))]
            with contextlib.suppress(Ended):
                reader.line.send(b"".join(kind(pieces)) + bytes(64))
            assert is_refused(reader)


def test_plain_requests_after_a_meeting_under_tls_are_refused(source):
    with source.reader("tls") as reader:
        request = struct.pack("<II", 1, 0) + ROW.pack(*source.regions[1])
        reader.line.send(request + bytes(64))
        assert is_refused(reader)


# Cut short


def whole_length(source, mode):
    """How many bytes a reader sends in a meeting and a request."""
    with source.reader(mode) as reader:
        reader.read(source.regions[1])
        return reader.line.sent


def cuts(source, mode):
    """Each length at which a meeting and a request can be cut short, or some of them."""
    whole = whole_length(source, mode)
    if TIMES > 1 or mode == "near":
        return range(whole)
    return sorted(random.Random(1).sample(range(whole), 60))


@modes
@pytest.mark.parametrize("how", ["ends", "resets", "stays"])
def test_a_meeting_and_a_request_that_are_cut_short_at_any_byte_hurt_nobody(source, mode, how):
    left = []
    for limit in cuts(source, mode):
        reader = Reader(source.card, mode, limit=limit)
        with pytest.raises(CutShort):
            reader.meet().ask(source.regions[1])
        if how == "resets":
            linger = struct.pack("ii", 1, 0)
            reader.line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if how == "stays" and len(left) < 40:
            left.append(reader)  # beside all that come after it
        else:
            reader.line.sock.close()
    source.assert_is_well()
    for reader in left:
        reader.line.sock.close()


# Requests


def beyond(address, size):
    """Rows of a region that are out of its bounds, or no rows at all."""
    end = address + size
    yield from ((address - 1, 1), (address - 1, 2), (address - 1, size + 2), (end, 1))
    yield from ((end - 1, 2), (address, size + 1), (address + 1, size), (end + 4096, 1))
    yield from ((0, 1), (WRAP - 1, 1), (WRAP - 1, 2), (0, WRAP - 1), (1, WRAP - 1))
    yield from ((address, WRAP - 1), (end - 1, WRAP - 1), (address, WRAP - address))
    yield from ((address, WRAP - address + 1), (end, WRAP - size), (end + 1, WRAP - 1))
    yield from ((address - 1 + (1 << 63), 1), (address, 1 << 63), (address ^ (1 << 63), 1))
    yield from ((address, 0), (end, 0), (0, 0), (WRAP - 1, 0))


@modes
def test_rows_that_are_out_of_bounds_by_a_byte_or_by_all_there_are_end_the_connection(source, mode):
    name, address, size = source.regions[1]
    good = source.regions[0]
    for row in beyond(address, size):
        for rows in ([(name, *row)], [good, (name, *row)], [(name, *row), good]):
            with source.reader(mode) as reader:
                reader.ask(*rows)
                assert is_refused(reader), (rows, address, size)


@modes
def test_a_row_that_goes_from_one_region_to_the_next_is_refused(source, mode):
    (name, start, _), (other, there, size), _ = source.regions
    for row in ((name, start, there + size - start), (other, start, 1), (name, there, 1)):
        with source.reader(mode) as reader:
            reader.ask(row)
            assert is_refused(reader), row


@modes
def test_heads_that_are_wrong_end_the_connection(source, mode):
    row = source.regions[1]
    for count, zero in ((0, 0), (ROWS_MAX + 1, 0), (1 << 31, 0), ((1 << 32) - 1, 0), (1, 1)):
        with source.reader(mode) as reader:
            reader.ask(row, count=count, zero=zero)
            assert is_refused(reader), (count, zero)


@modes
def test_more_bytes_than_a_request_may_have_are_refused_and_a_byte_less_is_not(source, mode):
    name, address, size = source.regions[2]
    count = BYTES_MAX // size
    rows = [(name, address, size)] * count + [(name, address, BYTES_MAX - count * size)]
    rows = [row for row in rows if row[2]]
    with source.reader(mode) as reader:
        reader.ask(*rows, (name, address, 1))
        assert is_refused(reader)
    with source.reader(mode) as reader:
        expected = (source.pattern(2).tobytes() * (count + 1))[:BYTES_MAX]
        assert reader.read(*rows) == expected
    halves = [(name, address, 1 << 63)] * 2  # whose sum is 0 in 64 bits
    with source.reader(mode) as reader:
        reader.ask(*halves, (name, address, 1))
        assert is_refused(reader)


def unknown(reader, *rows):
    """Whether the answer to these rows is that an id is unknown, and nothing else comes."""
    reader.ask(*rows)
    if reader.status() != 1:
        return False
    reader.line.sock.settimeout(0.02)
    with pytest.raises(TimeoutError):
        reader.line.some(1)
    reader.line.sock.settimeout(20)
    return True


@modes
def test_ids_that_nobody_has_are_answered_without_a_byte(source, mode):
    name, address, size = source.regions[1]
    wrong = [bytes(16), b"\xff" * 16, secrets.token_bytes(16), name[::-1]]
    wrong += [bytes([name[0] ^ 1]) + name[1:], name[:15] + bytes([name[15] ^ 1])]
    with source.reader(mode) as reader:
        for other in wrong:
            assert unknown(reader, (other, address, size))
            assert unknown(reader, (name, address, size), (other, address, 1))
            assert unknown(reader, (other, address, 1), (name, address, size))
            assert reader.read((name, address, size)) == source.pattern(1).tobytes()


@modes
def test_a_registration_that_is_closed_is_read_no_more_and_its_id_never_comes_again(source, mode):
    old, address, size = source.regions[1]
    with source.reader(mode) as reader:
        source.ask("unregister", 1)
        assert unknown(reader, (old, address, size))
        source.regions[1] = source.register(1)
        assert source.regions[1][0] != old
        assert unknown(reader, (old, address, size))
        assert reader.read(source.regions[1]) == source.pattern(1).tobytes()


@modes
def test_no_byte_leaves_a_registration_that_is_closed_within_an_answer(source, mode):
    """Bytes that were sent before are older than the close; the rest never comes."""
    name, address, size = source.regions[2]
    rows = [(name, address, size)] * (BYTES_MAX // size)
    for _ in range(3 * TIMES):
        with source.reader(mode, buffer_bytes=4096) as reader:
            reader.ask(*rows)
            assert reader.status() == 0
            source.ask("unregister", 2)
            source.fill(2, 255)  # nothing of this may ever come
            got = bytearray()
            with contextlib.suppress(Ended):
                for some in reader.content(*rows):
                    got += some
            source.restore(2)
            assert len(got) < len(rows) * size
            expected = source.pattern(2).tobytes() * len(rows)
            assert got == expected[: len(got)]
        source.regions[2] = source.register(2)
        name = source.regions[2][0]
        rows = [(name, address, size)] * len(rows)
