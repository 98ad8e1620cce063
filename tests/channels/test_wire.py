"""The parser of what comes over TCP: garbage is refused, and nothing else than that is raised."""

import contextlib
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ros.channels import wire
from torch_ros.channels.wire import DEVICES_MAX, Garbage, Named
from torch_ros.spans import HOST

SECRETS = bytes(range(32)), bytes(32)
CARD = wire.card_of("a/0-1", ("boot", 7), 7000, [bytes(4), bytes(16)], SECRETS)
BOUNDS = np.array([[10, 30], [20, 40]], np.uint64).tobytes()
NAMED = Named(bytes(16), -1, BOUNDS)


def test_a_card_says_what_it_was_made_of():
    card = wire.parse_card(CARD)
    assert (card.agent, card.boot, card.network, card.port) == ("a/0-1", "boot", 7, 7000)
    assert card.addresses == (bytes(4), bytes(16))
    assert (card.pin, card.token) == SECRETS


def test_no_token_is_shown_to_people():
    card = wire.parse_card(CARD)
    assert "x00" not in repr(card)
    assert "x01" not in f"{card}"


@pytest.mark.parametrize(
    "card",
    [
        b"",
        CARD[:-1],
        CARD + b"x",
        wire.card_of("a", ("boot", 7), 0, [], SECRETS),
        wire.card_of("a", ("boot", 7), 1 << 16, [], SECRETS),
        wire.card_of("", ("boot", 7), 7000, [], SECRETS),
        wire.card_of("a", ("boot", 7), 7000, [bytes(4)] * 9, SECRETS),
        wire.card_of("a", ("boot", 7), 7000, [bytes(17)], SECRETS),
        wire.card_of("a", ("boot", 7), 7000, [], (bytes(32), bytes(31))),
    ],
)
def test_another_card_is_refused(card):
    with pytest.raises(Garbage):
        wire.parse_card(card)


@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_be_refused(body):
    for parse in (wire.parse_card, wire.parse_descriptor):
        with pytest.raises(Garbage):
            parse(body)


@given(st.integers(0, len(CARD) - 1), st.integers(1, 255))
def test_a_card_with_another_byte_is_another_card_or_none(place, flip):
    changed = bytearray(CARD)
    changed[place] ^= flip
    with contextlib.suppress(Garbage):
        assert wire.parse_card(bytes(changed)) != wire.parse_card(CARD)


@pytest.mark.parametrize(
    "bounds",
    [
        b"",
        BOUNDS[:-1],
        BOUNDS[:8],
        np.array([[10], [10]], np.uint64).tobytes(),
        np.array([[20], [10]], np.uint64).tobytes(),
        np.array([[10, 15], [20, 40]], np.uint64).tobytes(),
        np.array([[30, 10], [40, 20]], np.uint64).tobytes(),
    ],
)
def test_regions_that_are_none_are_refused(bounds):
    starts, ends = NAMED.regions()
    assert (starts.tolist(), ends.tolist()) == ([10, 30], [20, 40])
    with pytest.raises(Garbage):
        Named(bytes(16), -1, bounds).regions()


@pytest.mark.parametrize("device", [HOST, 0, DEVICES_MAX - 1])
def test_a_descriptor_says_which_device_it_is_of(device):
    named = Named(bytes(16), device, BOUNDS)
    assert wire.parse_descriptor(wire.descriptor_of("a", [named])) == ("a", (named,))


@pytest.mark.parametrize("device", [HOST - 1, DEVICES_MAX, 1 << 63, "0", None, 0.0, True])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(Garbage):
        wire.parse_descriptor(wire.descriptor_of("a", [Named(bytes(16), device, BOUNDS)]))


def test_a_request_comes_back_as_it_was():
    rows = [(os.urandom(16), 8 * number, number + 1) for number in range(4096)]
    head, body = wire.request(rows)
    assert wire.parse_head(head) == len(rows)
    assert wire.parse_rows(body) == rows


@pytest.mark.parametrize("head", [(0, 0), (4097, 0), (1 << 31, 0), (1, 1)])
def test_a_request_of_no_rows_or_too_many_is_refused(head):
    with pytest.raises(Garbage):
        wire.parse_head(wire.HEAD.pack(*head))


@pytest.mark.parametrize("sizes", [(0,), (1, 0), (wire.BYTES_MAX + 1,), (wire.BYTES_MAX, 1)])
@pytest.mark.parametrize("address", [0, (1 << 64) - 1])
def test_a_request_of_nothing_or_of_too_much_is_refused(sizes, address):
    _, body = wire.request([(bytes(16), address, size) for size in sizes])
    with pytest.raises(Garbage):
        wire.parse_rows(body)


SIZES = st.lists(st.integers(1, 3 * wire.PIECE_BYTES), max_size=600)


@given(SIZES)
def test_pieces_have_each_byte_once_and_in_order(sizes):
    parts = [part for piece in wire.pieces(sizes, wire.PIECE_BYTES) for part in piece]
    at = dict.fromkeys(range(len(sizes)), 0)
    for number, first, size in parts:
        assert first == at[number]
        assert size > 0
        at[number] += size
    assert [at[number] for number in range(len(sizes))] == sizes
    assert [number for number, _, _ in parts] == sorted(number for number, _, _ in parts)
    for piece in wire.pieces(sizes, wire.PIECE_BYTES):
        assert sum(size for _, _, size in piece) <= wire.PIECE_BYTES
        assert 0 < len(piece) <= wire.PIECE_ROWS


@given(st.lists(st.integers(1, 3 * wire.BYTES_MAX), max_size=50), st.integers(0, 5000))
def test_a_source_takes_each_request_of_a_read(large, small):
    sizes = large + [1] * small
    rows = [(bytes(16), 10, 20, size) for size in sizes]
    asked = list(wire.requests(rows))
    for some in asked:
        head, body = wire.request([(name, source, size) for name, source, _, size in some])
        assert wire.parse_head(head) == len(some)
        wire.parse_rows(body)
        assert all(target - source == 10 for _, source, target, _ in some)
    assert sum(size for some in asked for *_, size in some) == sum(sizes)


def test_a_proof_is_of_one_end_and_one_mode():
    made = {
        wire.proof(bytes(32), who, mode, b"x")
        for who in ("knock", "source", "reader")
        for mode in (wire.NEAR, wire.SEALED)
    }
    assert len(made) == 6


@pytest.mark.parametrize("place", range(wire.KNOCK.size))
def test_a_knock_with_another_byte_opens_nothing(place):
    body = bytearray(wire.knock(wire.SEALED, bytes(32), bytes(32), bytes(32), "a"))
    assert wire.parse_knock(bytes(body), bytes(32), bytes(32), "a") == (wire.SEALED, bytes(32))
    body[place] ^= 3
    with pytest.raises(Garbage):
        wire.parse_knock(bytes(body), bytes(32), bytes(32), "a")
