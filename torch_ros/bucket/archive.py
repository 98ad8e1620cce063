"""Writes versions of a running fleet into a bucket, and collects old ones."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain as chain_of
from secrets import token_hex
from time import monotonic, time_ns

import msgspec
import torch

import torch_ros
from torch_ros.allocation import allocating
from torch_ros.bucket import chain
from torch_ros.bucket.buckets import Bucket
from torch_ros.bucket.deltas import Encoded, difference
from torch_ros.bucket.files import (
    FORMAT,
    PROBES,
    Encoding,
    InBucket,
    Mismatch,
    Parts,
    StoredBase,
    StoredFile,
    StoredVersion,
    decoded,
    kept,
    run_of_file,
    storable,
    stored_tensors,
)
from torch_ros.checkpoints import framing
from torch_ros.checkpoints.compared import Named
from torch_ros.checkpoints.framing import FILE_BYTES, INDEX, size_bytes
from torch_ros.errors import BucketError, ManifestMismatch, VersionNotFound
from torch_ros.printable import log_of

BUFFER_BYTES = 64 << 20
BUFFER_S = 300.0  # that one buffer may take
LOOK_S = 600.0  # between two looks at a bucket for which the fleet has nothing new
SCRAPE_S = 4.0  # for etcd to say how far the bucket is behind: Prometheus waits for ten seconds
SAY_S = 20.0  # for etcd to take what is said to those who close
GRACE_S = 3600.0  # for readers of what is collected; half of it for an upload

log: logging.Logger = log_of(__name__)

OnBytes = Callable[[int, int], None]  # told how many are uploaded, and of how many
Held = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Archived:
    """A version that is in the bucket now; `base`: the one that it is a delta of."""

    version: int
    run: str
    tensor_count: int
    size_bytes: int
    seconds: float
    left_out: tuple[str, ...]
    base: int | None = None


@dataclass(slots=True)
class Totals:
    """An archiver's life so far."""

    versions: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    collected: int = 0
    retries: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Form:
    """How versions are written.

    Attributes:
        streams: Upload while reading, through two buffers; the source waits for the upload. All
            versions are full then.
        deltas: At most so many behind a full one; 0: none. Where there may be some, the last
            version stays in memory.
        encoding: Of deltas.
        file_bytes: The size of a file, unless one tensor is larger.
    """

    streams: bool = False
    deltas: int = 0
    encoding: Encoding = "gaps"
    file_bytes: int = FILE_BYTES


@dataclass(frozen=True, slots=True)
class _Written:
    """The version that was written last, and is in memory: what the next one may be a delta of."""

    version: InBucket
    tensors: Held
    full_bytes: int
    delta_bytes: tuple[int, ...] = ()  # of each delta since the full one


class Archiver:
    """Copies the newest version of a fleet into a bucket, again and again. For one thread.

    It reads as any reader does, into memory, and uploads when its source has been let go, however
    slow the bucket is. It holds nothing, so no publisher takes it for another copy. A delta is of
    the version that it wrote before: it says what lies between two versions that were both read,
    however many were published in between.

    Args:
        handle: An open handle of the model, with one rank.
        bucket: The same model's.
        keep: How many versions stay; older ones are collected.
        grace_s: How long files stay after their manifest has gone, for who still reads them. An
            upload that takes half as long is given up: this is how a file that nobody will
            name is told from one that is being written.
        form: How versions are written.
    """

    totals: Totals
    model: str

    def __init__(
        self,
        handle: torch_ros.ShardHandle,
        bucket: Bucket,
        *,
        keep: int,
        grace_s: float = GRACE_S,
        form: Form = Form(),
    ) -> None:
        self._handle, self._bucket, self._keep = handle, bucket, keep
        bucket.store.make(bucket.root)
        self._grace_s, self._form = grace_s, form
        self._before: _Written | None = None
        self._has_marked = False
        self._seen: torch_ros.VersionRef | None = None  # the bucket has it, or needs not have it
        self._newest: InBucket | None = None  # of its run
        self.model, self.totals = bucket.model, Totals()
        self._looked_s = -math.inf  # when the bucket was collected last
        self._unnamed_s: dict[str, float] = {}  # files without a manifest; since when
        self._legible: dict[str, bool] = {}  # keys of manifests

    @property
    def seen(self) -> int | None:
        """The newest version, when the fleet was asked last. The bucket has it, or a newer one."""
        return self._seen and self._seen.version

    @property
    def due_s(self) -> float:
        """In how many seconds there is something to do, if the fleet has nothing new."""
        over_s = min(self._unnamed_s.values(), default=math.inf) + self._grace_s
        return max(0.0, min(over_s, self._looked_s + LOOK_S) - monotonic())

    def behind(self) -> tuple[int, float] | None:
        """By how many numbers and seconds the bucket is behind; None: the fleet has no version.

        Any thread may ask. Costs a request to etcd.

        Raises: BackendError: etcd does not answer.
        """
        fleet = self._fleet(SCRAPE_S)
        for each in fleet.versions:
            if each.ref == fleet.latest:
                now_ms, at_ms = time_ns() // 10**6, each.at_ms or 0
                return chain.behind(self._newest, each.ref.run, each.ref.version, at_ms, now_ms)
        return None

    def _fleet(self, timeout_s: float | None = None) -> torch_ros.Fleet:
        """All that trainers have published: what comes from a bucket, in run 0, is there."""
        fleet = self._handle.fleet(timeout_s=timeout_s)
        runs = {name: number for name, number in fleet.runs.items() if number}
        versions = [each for each in fleet.versions if each.ref.run_number]
        return replace(fleet, runs=runs, versions=versions)

    def say(self) -> None:
        """Tell who closes what the bucket has; who alone has something newer stays for a while.

        Costs a request or two, if that has changed, or this process has taken another seat.

        Raises: BackendError, SeatLost: Nobody is told.
        """
        self._handle.archives.say(self._seen, timeout_s=SAY_S)

    def archive(self, progress: OnBytes) -> Archived | None:
        """Write the newest version, unless the bucket has it, or there is none.

        The bucket is not asked about a version that it had when it was asked last, until `due_s`.

        Raises:
            BucketError: The store refuses, or does not answer. No manifest was written.
            PeerError, NotAvailable, BackendError: As `ShardHandle.stream`; likewise.
        """
        handle, bucket = self._handle, self._bucket
        self.say()
        fleet = self._fleet()
        if (ref := fleet.latest) is None:
            return None
        if ref == self._seen and self.due_s > 0:
            return None
        kept_ = bucket.kept()
        there = self._counted(kept_, fleet.runs.keys())
        of_run = chain.living(each for each in there if each.run == ref.run)
        self._newest = next(iter(of_run), None)
        if any(_is_of(ref, each) for each in there):
            self._seen = ref
            return None
        began_s = monotonic()
        contents = handle.contents(ref.version)
        [published] = [each for each in fleet.versions if each.ref == ref]
        new = _named(fleet, published, there)
        if new in chain.to_collect([*there, new], self._keep, fleet.runs.keys()):
            self._seen = ref
            return None  # an older one, whose newer ones have left the fleet and not the bucket
        before, self._before = self._before, None  # until this one is there
        try:
            with self._incoming(new, list(contents.tensors)) as incoming:
                new, stored, after = self._written(new, contents, incoming, before, progress)
        except ManifestMismatch as error:  # it has other tensors by now
            raise self._published_anew(new) from error
        if monotonic() - began_s > self._grace_s / 2:
            why = f"writing it took longer than {self._grace_s / 2:g} s, half of the grace"
            bucket.store.refuse(f"{bucket.root}/{new.key}", why)
        self._commit(new, stored)
        odd = [each for each in kept_ if each not in there and _is_of(ref, each)]
        bucket.store.delete(f"{bucket.root}/{each.key}" for each in odd)
        self._seen, self._before, self._newest = ref, after, new
        took_s, base = monotonic() - began_s, new.base and new.base[0]
        sizes = len(contents.tensors), stored.size_bytes
        self.totals.versions += 1
        self.totals.size_bytes += stored.size_bytes
        self.totals.seconds += took_s
        return Archived(ref.version, ref.run, *sizes, took_s, contents.objects, base)

    def _counted(self, found: Sequence[InBucket], known: Collection[str]) -> list[InBucket]:
        """Those of runs that etcd does not know, and those whose manifests can be read."""
        for each in found:
            if each.run in known and each.key not in self._legible:
                try:
                    self._bucket.manifest(each)
                    self._legible[each.key] = True
                except BucketError as error:
                    if not isinstance(error.__cause__, Mismatch):
                        raise
                    self._legible[each.key] = False
                    log.warning("%s; it does not count, and is replaced if it is the newest", error)
        self._legible = {e.key: self._legible[e.key] for e in found if e.key in self._legible}
        return [each for each in found if self._legible.get(each.key, True)]

    def _written(
        self,
        new: InBucket,
        contents: torch_ros.Contents,
        incoming: Iterator[Named],
        before: _Written | None,
        progress: OnBytes,
    ) -> tuple[InBucket, StoredVersion, _Written | None]:
        """Its files are in the bucket, and the manifest is not. And what the next one begins with.

        Args:
            before: The version that was written last, if it is in memory.
        """
        if not self._has_marked:
            self._bucket.store.mark(self._bucket.root)
            self._has_marked = True
        plain = StoredVersion(
            FORMAT,
            self._handle.model,
            new.run,
            new.version,
            new.uid,
            (),
            contents.objects,
            self._handle.replica,
        )
        if self._form.streams or not self._form.deltas:
            return new, self._full(new, plain, contents, incoming, progress), None
        held = dict(incoming)
        made = self._made(before, new, held)
        if made is None or before is None:
            stored = self._full(new, plain, contents, iter(held.items()), progress)
            return new, stored, _Written(new, held, stored.size_bytes)
        base = before.version
        new = replace(new, base=(base.version, base.nonce))
        arrays = framing.described(made.arrays)
        by_file = framing.files(arrays, self._form.file_bytes)
        by_file = {name.replace("model", "delta", 1): each for name, each in by_file.items()}
        stored = msgspec.structs.replace(
            plain,
            files=self._files(new, by_file, arrays, iter(made.arrays.items()), progress)
            if made.arrays
            else (),
            base=StoredBase(base.version, base.uid, base.nonce),
            changes=made.changes,
            encoding=self._form.encoding,
        )
        sizes = (*before.delta_bytes, stored.size_bytes)
        return new, stored, _Written(new, held, before.full_bytes, sizes)

    def _made(self, before: _Written | None, new: InBucket, held: Held) -> Encoded | None:
        """What has changed since the version before; None: this one is to be full."""
        if before is None or len(before.delta_bytes) >= self._form.deltas:
            return None
        base = before.version
        is_next = (base.run_number, base.run) == (new.run_number, new.run)
        if not is_next or base.version >= new.version or self._bucket.manifest(base) is None:
            return None
        if framing.described(before.tensors) != framing.described(held):
            return None
        made = difference(before.tensors, held, self._form.encoding)
        sizes = (*before.delta_bytes, made.size_bytes)
        return made if chain.is_short(sizes, before.full_bytes, self._form.deltas) else None

    def _full(
        self,
        new: InBucket,
        plain: StoredVersion,
        contents: torch_ros.Contents,
        incoming: Iterator[Named],
        progress: OnBytes,
    ) -> StoredVersion:
        tensors = storable(contents.tensors)
        by_file = framing.files(tensors, self._form.file_bytes)
        files = self._files(new, by_file, contents.tensors, incoming, progress)
        if len(files) > 1:
            index = framing.index(by_file, sum(map(size_bytes, tensors.values())))
            self._bucket.store.put(f"{self._bucket.root}/{new.files_at}/{INDEX}", [index])
        return msgspec.structs.replace(plain, files=files)

    def _files(
        self,
        new: InBucket,
        by_file: Mapping[str, framing.Tensors],
        tensors: framing.Tensors,
        incoming: Iterator[Named],
        progress: OnBytes,
    ) -> tuple[StoredFile, ...]:
        """Write files, of tensors as they come. `tensors`: as the manifest writes them."""
        folder = f"{self._bucket.root}/{new.files_at}"
        total = sum(size_bytes(each) for inside in by_file.values() for each in inside.values())
        about = {"format": "pt", "torch_ros.model": self._handle.model, "torch_ros.run": new.run}
        about["torch_ros.version"] = str(new.version)
        files, done = [], 0
        for name, inside in by_file.items():
            header, parts = framing.header(inside, about), Parts()
            content: Iterator[bytes | memoryview] = chain_of(
                [header], framing.contents(inside, incoming)
            )
            put = _told(parts.passing(content), progress, done, total)
            whole = len(header) + sum(map(size_bytes, inside.values()))
            self._bucket.store.put(f"{folder}/{name}", put, size_bytes=whole)
            stored = stored_tensors(inside, tensors)
            files.append(StoredFile(name, parts.size_bytes, len(header), stored, parts.digests()))
            done += parts.size_bytes - len(header)
        return tuple(files)

    @contextmanager
    def _incoming(self, new: InBucket, names: Sequence[str]) -> Iterator[Iterator[Named]]:
        """The version's tensors, each until the next one comes."""
        with self._handle.stream(
            new.version, names, buffer_bytes=BUFFER_BYTES, timeout_s=BUFFER_S
        ) as stream:
            self._require_same(new)
            if self._form.streams:
                yield stream
                return
            held = deque((name, _held(tensor)) for name, tensor in stream)
        yield (held.popleft() for _ in range(len(held)))

    def _commit(self, new: InBucket, stored: StoredVersion) -> None:
        """Write the manifest, if it is in order and all files are there; and as long as they are.

        An archiver with a shorter grace, or one that this one has replaced, may collect them.
        """
        bucket, key, content = self._bucket, f"{self._bucket.root}/{new.key}", stored.encode()
        try:
            decoded(content, bucket.model, new)
        except Mismatch as error:
            bucket.store.refuse(key, f"the stream did not bring what it promised: {error}")
        self._require_files(new, stored)
        if not bucket.store.create(key, content):
            bucket.store.refuse(key, "another manifest has its name")
        try:
            self._require_files(new, stored)
        except BucketError:
            bucket.store.delete([key])
            raise

    def _require_files(self, new: InBucket, stored: StoredVersion) -> None:
        folder = f"{self._bucket.root}/{new.files_at}"
        there = {each.key: each.size_bytes for each in self._bucket.store.list(folder)}
        for file in stored.files:
            key = f"{folder}/{file.name}"
            if there.get(key) != file.size_bytes:
                reason = f"it has {there.get(key, 0)} bytes, of {file.size_bytes} that were written"
                self._bucket.store.refuse(key, f"{reason}: another archiver may collect here")

    def _require_same(self, new: InBucket) -> None:
        """The stream has this uid, too: a number that is published anew never gets an old one."""
        fleet = self._fleet()
        of_run = [each.ref for each in fleet.versions if each.ref.run == new.run]
        is_there = any((ref.version, ref.uid) == (new.version, new.uid) for ref in of_run)
        if not is_there or fleet.latest is None or fleet.latest.run != new.run:
            raise self._published_anew(new)

    def _published_anew(self, new: InBucket) -> VersionNotFound:
        reason = "it was published anew, or another run has begun"
        return VersionNotFound(self._handle.model, str(new.version), reason)

    def collect(self) -> int:
        """Delete old versions, and the files that no manifest has named for `grace_s`.

        Only the process that has the archiver's name in etcd may call it.

        Returns:
            How many objects were deleted.

        Raises:
            BucketError: The store refuses, or does not answer; some may be deleted.
        """
        bucket, now_s = self._bucket, monotonic()
        known = self._fleet().runs.keys()
        keys = bucket.keys()
        found = [each for key in keys if (each := kept(key))]
        there = self._counted(found, known)
        old = chain.to_collect(there, self._keep, known)
        for odd in (each for each in found if each not in there):
            newer = [e for e in there if e.run == odd.run and e.version > odd.version]
            old += [odd] if len(newer) >= self._keep else []
        bucket.store.delete(f"{bucket.root}/{each.key}" for each in old)
        mine = [each for each in found if each.run in known]
        named = {each.files_at for each in mine if each not in old}
        files = [key for key in keys if run_of_file(key) in known]
        unnamed = [key for key in files if key.rpartition("/")[0] not in named]
        unnamed += [key for key in keys if key.startswith(f"{PROBES}/")]
        self._unnamed_s = {each: self._unnamed_s.get(each, now_s) for each in unnamed}
        gone = [key for key in unnamed if now_s - self._unnamed_s[key] >= self._grace_s]
        bucket.store.delete(f"{bucket.root}/{key}" for key in gone)
        for key in gone:
            del self._unnamed_s[key]
        self._looked_s = now_s
        self.totals.collected += len(old) + len(gone)
        return len(old) + len(gone)


def _named(
    fleet: torch_ros.Fleet, published: torch_ros.Published, there: Sequence[InBucket]
) -> InBucket:
    """How a version is called in a bucket, beside those that are there."""
    ref = published.ref
    return InBucket(
        chain.run_number(there, ref.run, fleet.runs),
        ref.run,
        ref.version,
        chain.born_ms(there, ref.run, ref.version, ref.uid, published.at_ms or 0),
        ref.uid,
        token_hex(4),
    )


def _is_of(ref: torch_ros.VersionRef, there: InBucket) -> bool:
    return (ref.run, ref.version, ref.uid) == (there.run, there.version, there.uid)


def _held(tensor: torch.Tensor) -> torch.Tensor:
    with allocating("a version that is held whole", tensor.nbytes, "--stream takes two buffers"):
        return tensor.clone()


def _told(content: Iterator[bytes], progress: OnBytes, done: int, total: int) -> Iterator[bytes]:
    """The bytes of a file, whose header does not count."""
    for number, piece in enumerate(content):
        done += len(piece) if number else 0
        progress(min(done, total), total)
        yield piece
