"""Every etcd key is written and parsed here and nowhere else. `docs/PROTOCOL.md` has the table.

Anybody may have written a key that is found: the parsers give None for one that is not exactly what
`Keys` makes of some names and numbers.
"""

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

from torch_ros.store.txn import Range, T, under

ROOT = "/torch-ros"
EVERY_MODEL = under(f"{ROOT}/")
VERSION_DIGITS = 20  # of 2**64 - 1: key order is version order
VERSION_MAX = 2**63 - 1
RANK_DIGITS = 6
LINGERS = "linger"
STREAMS = "stream"
DEFAULT_DATACENTER = "default"
SEEN_SLOTS = 1 << 16  # each for one replica's `seen/`: on no lease, these would only grow
OUTSIDE = "bucket"  # the run of versions that no replica published, below all others


def instance(replica: str, nonce: str) -> str:
    """The name of one incarnation of a replica, so that a restart is never its predecessor."""
    return f"{_name(replica)}@{nonce}"


def copy_of(inst: str, call: int) -> str:
    """The name under which an incarnation offers a copy in host memory, made in its call `call`. No
    replica can have it: a "+" in a replica's name is percent-encoded.
    """
    replica, _, nonce = inst.partition("@")
    return f"{replica}+{call}@{nonce}"


def stream_of(inst: str, number: int) -> str:
    """The name under which the `number`-th stream of one of its ranks reads."""
    replica, _, nonce = inst.partition("@")
    return f"{replica}+{STREAMS}{number}@{nonce}"


def lingering_of(inst: str, call: int) -> str:
    """The name under which what `inst` offers by its call `call` stays when `inst` has ended. Its
    successor deletes what has the name of an incarnation before it, and nothing that has this.
    """
    replica, _, nonce = owner_of(inst).partition("@")
    return f"{replica}+{LINGERS}{call}@{nonce}"


def first_of(inst: str) -> str:
    """The first incarnation of the start that `inst` belongs to, or a copy of that one."""
    replica, _, nonce = inst.partition("@")
    return f"{replica}@{family(nonce)}"


def lingers(inst: str) -> bool:
    return f"+{LINGERS}" in inst.partition("@")[0]


def streams(inst: str) -> bool:
    return f"+{STREAMS}" in inst.partition("@")[0]


def owner_of(inst: str) -> str:
    """The incarnation that made this copy, or left it to linger; itself, if it is neither."""
    replica, _, nonce = inst.partition("@")
    return f"{replica.partition('+')[0]}@{nonce}"


def is_of(inst: str, owner: str) -> bool:
    """Whether `inst` is the incarnation `owner`, or a copy that it offers."""
    return owner_of(inst) == owner


def family(nonce: str) -> str:
    """The part that all incarnations of one start have in common."""
    return nonce.partition(".")[0]


def replica_of(inst: str) -> str:
    return unquote(inst.partition("@")[0])


@lru_cache(4096)
def _name(text: str) -> str:
    """`text` without slashes or "@": a name must not be able to reach into another prefix."""
    return quote(text, safe="")


def place(datacenter: str, inst: str) -> str:
    """The end of the key of a holding: where, and whose."""
    return f"{_name(datacenter)}/{inst}"


def inst_at(place: str) -> str:
    return place.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class HoldingKey:
    """The parts of a holding's key."""

    run: str
    version: int
    datacenter: str
    inst: str


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one model."""

    model: str

    @property
    def root(self) -> str:
        return f"{ROOT}/{_name(self.model)}"

    def all(self) -> Range:
        return under(f"{self.root}/")

    def schema(self) -> str:
        return f"{self.root}/schema"

    def groups(self) -> Range:
        return under(f"{self.root}/groups/")

    def group(self, replica: str) -> str:
        return f"{self.root}/groups/{_name(replica)}"

    def every_shard(self) -> Range:
        return under(f"{self.root}/shards/")

    def shards(self, inst: str) -> Range:
        return under(f"{self.root}/shards/{inst}/")

    def shards_of(self, replica: str) -> Range:
        """Covers all its incarnations."""
        return under(f"{self.root}/shards/{instance(replica, '')}")

    def shards_of_copies(self, replica: str) -> Range:
        """The range of those in host memory, and of what lingers, of all its incarnations."""
        return under(f"{self.root}/shards/{_name(replica)}+")

    def shard(self, inst: str, rank: int) -> str:
        return f"{self.root}/shards/{inst}/{rank:0{RANK_DIGITS}d}"

    def seen(self) -> Range:
        return under(f"{self.root}/seen/")  # the processes that took seats, on no lease

    def seen_of(self, replica: str) -> Range:
        return under(f"{self._slot(replica)}{_name(replica)}/")

    def seen_at(self, replica: str, rank: int) -> str:
        return f"{self._slot(replica)}{_name(replica)}/{rank:0{RANK_DIGITS}d}"

    def seen_beside(self, replica: str) -> tuple[Range, Range]:
        """The ranges of other replicas of the same slot: a new group deletes their records."""
        slot, own = under(self._slot(replica)), self.seen_of(replica)
        return Range(slot.start, own.start), Range(own.end, slot.end)

    def _slot(self, replica: str) -> str:
        return f"{self.root}/seen/{_slot_of(replica)}/"

    def decisions(self, inst: str) -> str:
        return f"{self.root}/decisions/{inst}"

    def decisions_of(self, replica: str) -> Range:
        """Covers all its incarnations."""
        return under(self.decisions(instance(replica, "")))

    def readies(self, inst: str, call: int) -> Range:
        return under(f"{self.root}/ready/{inst}/{call}/")

    def ready(self, inst: str, call: int, rank: int) -> str:
        return f"{self.root}/ready/{inst}/{call}/{rank:0{RANK_DIGITS}d}"

    def all_begun(self, inst: str) -> Range:
        return under(f"{self.root}/begun/{inst}/")

    def begun(self, inst: str, rank: int) -> str:
        return f"{self.root}/begun/{inst}/{rank:06d}"

    def runs(self) -> Range:
        return under(f"{self.root}/runs/")

    def run(self, run: str) -> str:
        return f"{self.root}/runs/{_name(run)}"

    def versions(self, run: str | None = None) -> Range:
        return under(f"{self.root}/versions/" + ("" if run is None else f"{_name(run)}/"))

    def versions_above(self, run: str, version: int) -> Range:
        return Range(self.version(run, version + 1), self.versions(run).end)

    def version(self, run: str, version: int) -> str:
        return f"{self.root}/versions/{_name(run)}/{version:0{VERSION_DIGITS}d}"

    def holdings(self, run: str | None = None) -> Range:
        return under(f"{self.root}/holdings/" + ("" if run is None else f"{_name(run)}/"))

    def holdings_of(self, run: str, version: int) -> Range:
        return under(self.holding_at(run, version, ""))

    def holdings_in(self, run: str, version: int, datacenter: str) -> Range:
        return under(self.holding(run, version, datacenter, ""))

    def holding(self, run: str, version: int, datacenter: str, inst: str) -> str:
        return self.holding_at(run, version, place(datacenter, inst))

    def holding_at(self, run: str, version: int, place: str) -> str:
        return f"{self.root}/holdings/{_name(run)}/{version:0{VERSION_DIGITS}d}/{place}"

    def retains(self, datacenter: str) -> Range:
        return under(f"{self.root}/retains/{_name(datacenter)}/")  # what is to stay there

    def retain(self, datacenter: str, replica: str) -> str:
        return f"{self.root}/retains/{place(datacenter, _name(replica))}"

    def readers(self) -> Range:
        return under(f"{self.root}/readers/")

    def readers_for(self, run: str, version: int) -> Range:
        return under(self._reads(run, version, ""))

    def readers_of(self, run: str, version: int, source: str) -> Range:
        return under(f"{self._reads(run, version, source)}/")

    def readers_of_any(self, run: str, version: int, source: str) -> Range:
        """Those of `source` and of every other incarnation of its replica."""
        return under(f"{self._reads(run, version, source.partition('@')[0])}@")

    def reader_group(self, run: str, version: int, source: str, reader: str) -> str:
        return f"{self._reads(run, version, source)}/{reader}/group"

    def reader(self, run: str, version: int, source: str, reader: str, rank: int) -> str:
        return f"{self._reads(run, version, source)}/{reader}/{rank:0{RANK_DIGITS}d}"

    def suspects(self) -> Range:
        return under(f"{self.root}/suspects/")

    def suspect(self, source: str, reader: str) -> str:
        return f"{self.root}/suspects/{source}/{reader}"

    def carried(self) -> Range:
        return under(f"{self.root}/carried/")  # what features say of replicas

    def carried_by(self, inst: str) -> Range:
        return under(f"{self.root}/carried/{inst}/")

    def carried_at(self, inst: str, feature: str) -> str:
        return f"{self.root}/carried/{inst}/{_name(feature)}"

    def archives(self) -> Range:
        return under(f"{self.root}/archives/")  # the versions that buckets have

    def archive(self, replica: str) -> str:
        return f"{self.root}/archives/{_name(replica)}"

    def _reads(self, run: str, version: int, source: str) -> str:
        return f"{self.root}/readers/{_name(run)}/{version:0{VERSION_DIGITS}d}/{source}"


def parse_model(key: str) -> str | None:
    match key.split("/"):
        case ["", _, model, _, *_]:
            return _unquoted(model)
    return None


def parse_rank(key: str) -> int | None:
    """The rank whose `shards/`, `ready/` or `begun/` key this is."""
    match key.split("/"):
        case ["", _, _, "shards" | "begun", _, rank] | ["", _, _, "ready", _, _, rank]:
            return _number(rank, RANK_DIGITS)
    return None


def _slot_of(replica: str) -> str:
    return f"{zlib.crc32(_name(replica).encode()) % SEEN_SLOTS:04x}"


def _version(run: str, version: str) -> tuple[str, int] | None:
    name, number = _unquoted(run), _number(version, VERSION_DIGITS)
    if name is None or number is None or number > VERSION_MAX:
        return None
    return name, number


def _unquoted(text: str) -> str | None:
    """The name that `_name` writes as `text`; None: there is none."""
    name = unquote(text)
    if re.search("[\ud800-\udfff]", name):  # lone surrogates, of bytes that are no UTF-8
        return None
    return name if name and _name(name) == text else None


def _number(text: str, digits: int) -> int | None:
    return int(text) if re.fullmatch(f"[0-9]{{{digits}}}", text) else None


def _is_inst(text: str) -> bool:
    return bool(re.fullmatch(r"[\w.~%+-]+@[\w.~%+-]+", text, re.ASCII))


def _holding(run: str, version: str, datacenter: str, inst: str) -> HoldingKey | None:
    where, there = _version(run, version), _unquoted(datacenter)
    return HoldingKey(*where, there, inst) if where and there and _is_inst(inst) else None


def _reader(
    run: str, version: str, source: str, inst: str, who: str
) -> tuple[str, str, str] | None:
    is_whole = _version(run, version) and _is_inst(source) and _is_inst(inst)
    is_rank = who == "group" or _number(who, RANK_DIGITS) is not None
    return (source, inst, who) if is_whole and is_rank else None


def _seen(slot: str, replica: str, rank: str) -> tuple[str, int] | None:
    name, number = _unquoted(replica), _number(rank, RANK_DIGITS)
    if name is None or number is None or slot != _slot_of(name):
        return None
    return name, number


def _carried(inst: str, feature: str) -> tuple[str, str] | None:
    name = _unquoted(feature)
    return (inst, name) if name and _is_inst(inst) else None


def _retaining(datacenter: str, replica: str) -> str | None:
    return _unquoted(replica) if _unquoted(datacenter) else None


def _suspected(source: str, reader: str) -> str | None:
    return source if _is_inst(source) and _is_inst(reader) else None


def _shard(inst: str, rank: str) -> str | None:
    return inst if _is_inst(inst) and _number(rank, RANK_DIGITS) is not None else None


def _parser(folder: str, count: int, parse: Callable[..., T | None]) -> Callable[[str], T | None]:
    """A parser of the keys below `folder`: `parse` gets their `count` parts. None: other keys."""

    @lru_cache(4096)  # a view is parsed again and again
    def parsed(key: str) -> T | None:
        match key.split("/"):
            case ["", _, _, there, *parts] if there == folder and len(parts) == count:
                return parse(*parts)
        return None

    return parsed


parse_run = _parser("runs", 1, _unquoted)
parse_version = _parser("versions", 2, _version)  # run, version
parse_holding = _parser("holdings", 4, _holding)
parse_reader = _parser("readers", 5, _reader)  # source, reader, "group" or rank
parse_group = _parser("groups", 1, _unquoted)
parse_retain = _parser("retains", 2, _retaining)  # the replica
parse_suspect = _parser("suspects", 2, _suspected)  # the source
parse_carried = _parser("carried", 2, _carried)  # incarnation, feature
parse_archive = _parser("archives", 1, _unquoted)  # the archiver
parse_shard = _parser("shards", 2, _shard)  # the incarnation, or copy
parse_seen = _parser("seen", 3, _seen)  # replica, rank
