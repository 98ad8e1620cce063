"""The journal of a process: its reports as lines of a file, for `torch-ros trace --merge`. Pure.

The first line says who writes, each other one tells of a call. A process that was killed leaves
whole lines, except perhaps for the last.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from torch_ros.errors import UsageError
from torch_ros.protocol.records import Number
from torch_ros.release import RELEASE

FORMAT = 1
SUFFIX = ".jsonl"
SHOWN_MAX = 60  # bytes of a line that is no journal's

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e8)]


class Author(msgspec.Struct, frozen=True):
    """The process that writes. Further fields may be another format's."""

    format: int
    release: str  # for people
    host: str = ""
    pid: int = 0
    clock: str = ""  # the boot of a machine: processes with one clock need no alignment


class Journaled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call of one rank that has ended well.

    Attributes:
        start: The first part of its incarnation's nonce: tells calls of one number apart.
        uid: The content's: the same number published again is another version.
        ended_ns: Since 1970, by the author's clock as it stood when the journal began.
        sources: The replicas that were read from; the last ones, if some were lost.
        size_bytes: As many as this rank's tensors have.
    """

    kind: Literal["publish", "read", "drain"]
    model: str
    replica: str
    rank: Number
    start: str
    call: Number
    version: Number
    uid: str
    ended_ns: Number
    elapsed_s: Seconds
    stages_s: dict[str, Seconds] = {}
    is_offered: bool = True
    sources: list[str] = []
    size_bytes: Number = 0
    ways: dict[str, Number] = {}
    reroutes: Number = 0
    waited_for: list[str] = []
    left_behind: list[str] = []

    @property
    def took_ns(self) -> int:
        return int(1e9 * self.elapsed_s)

    @property
    def began_ns(self) -> int:
        return self.ended_ns - self.took_ns


@dataclass(frozen=True, slots=True)
class Journal:
    """A file, as far as it can be read.

    Attributes:
        author: None: it was killed before it had said so.
        cut: Whether the last line is not whole, and left out.
        unreadable: How many of the others were left out.
    """

    name: str
    author: Author | None
    done: tuple[Journaled, ...] = ()
    cut: bool = False
    unreadable: int = 0


def line(each: Author | Journaled) -> bytes:
    return msgspec.json.encode(each) + b"\n"


def parsed(name: str, text: bytes) -> Journal:
    """The journal in a file.

    Raises:
        UsageError: The file is no journal, or one of another release.
    """
    first, *lines = text.split(b"\n")
    if not lines:
        return Journal(name, None, cut=True)
    author = _author(name, first)
    done = [_done(each) for each in lines[:-1]]
    there = tuple(each for each in done if each is not None)
    return Journal(name, author, there, cut=lines[-1] != b"", unreadable=len(done) - len(there))


def _author(name: str, first: bytes) -> Author:
    try:
        author = msgspec.json.decode(first, type=Author)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{name} is no journal of torch_ros, it begins with {first[:SHOWN_MAX]!r}; "
            f"take the file out of the folder"
        ) from error
    if author.format != FORMAT:
        raise UsageError(
            f"{name} was written by release {author.release} of torch_ros (format "
            f"{author.format}), and this is release {RELEASE} (format {FORMAT}); use that "
            "release's torch-ros, or take the file out of the folder"
        )
    return author


def _done(text: bytes) -> Journaled | None:
    try:
        return msgspec.json.decode(text, type=Journaled)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
