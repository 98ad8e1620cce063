"""The bytes that two processes agree on: `Card`, `Notice` and `Word`.

Card, mailbox and manifest: docs/protocol/wire.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from torch_ros.digests import digest_of

MAILBOX_BYTES = 4096
WORD_BYTES = 8
HEADER_BYTES = 32  # the word, the notice's length, its digest
RATE_BYTES = 8  # at the mailbox's end: the rate at which bytes land at this process
ALL_BLOCKS = 2**32 - 1  # as a position: all blocks are there
ADDRESS_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Word:
    """The content that a process serves, by its mark, and how many of its blocks are there."""

    mark: int = 0  # of `protocol.records.mark`; 0: nothing
    position: int = 0  # blocks that are there, in the order of the layout

    def pack(self) -> int:
        return self.mark << 32 | self.position

    @classmethod
    def unpack(cls, value: int) -> Word:
        return cls(value >> 32, value & ALL_BLOCKS)


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to reach a process; below 8 KiB."""

    agent: str
    connection: bytes
    mailbox: bytes  # descriptor of the region that holds it
    mailbox_address: int

    @classmethod
    def decode(cls, card: bytes) -> Card:
        """Raises: msgspec.MsgspecError, UnicodeDecodeError: These bytes are no card."""
        return msgspec.msgpack.decode(card, type=cls)


class Notice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place of a process's manifest, and the digest that it must have."""

    address: int
    size_bytes: int
    digest: bytes
    descriptor: bytes  # of the region that holds it

    def pack(self) -> bytes:
        """Return the notice as it stands in a mailbox behind the word: length, digest, content."""
        notice = msgspec.msgpack.encode(self)
        return len(notice).to_bytes(8, "little") + digest_of(notice) + notice
