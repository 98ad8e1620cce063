"""Objects under keys, in whichever store a URL names. Knows nothing of versions.

Stores differ in two ways that matter here. Some ignore the condition of a create, and overwrite:
`probe` tells. And a request whose reply was lost is made again, which then finds its own object.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import unquote, urlsplit

from torch_ros.errors import BucketError, TorchRosError, UnreadableVersion, UsageError
from torch_ros.printable import log_of

if TYPE_CHECKING:
    from obstore.store import MemoryStore
    from obstore.store import ObjectStore as Vendor

log: logging.Logger = log_of(__name__)

UPLOAD_PART_BYTES = 8 << 20  # at least
PARTS_MAX = 10_000  # of an object, in S3
CREATES_MAX = 5  # of a key, while others create it and fail
UPLOADS = 4  # parts of a file that are under way at a time, each with its memory
RETRY_S, RETRIES = 60.0, 10  # a store that says "slow down", or does not answer
CONNECT_S = 10.0
# For the next bytes; also for the first ones of a reply, while all parts of an upload share a link.
READ_S = 120.0
REQUEST_S = 600.0  # for one request: readers ask for 64 MiB at a time, in four threads

# How a folder's store names a file that it is writing. It neither lists one nor deletes it.
UNFINISHED = re.compile(r".*#[0-9]+")

SMALL_BYTES = 1 << 30  # of what is read at once; a manifest of 1 TiB in 100,000 tensors has 15 MiB
PAGE = 1000  # keys of a list that a store sends at once
SHOWN = 60  # bytes of what is no store's answer
# The first object of a writer below a prefix. A reader whose list is empty asks for it: a list that
# does not show it is none, and where it is not there, nobody has written anything.
MARKER, MARK = "torch_ros", b"torch_ros writes versions here\n"

_FORMS = "s3://bucket/prefix, gs://, az://, hf://buckets/owner/name, file:///folder, a folder, or memory://name"
_ADVICE = {
    "NotFoundError": "check the name of the bucket; of an object, whether it was collected",
    "PermissionDeniedError": "give this process's credentials the right to do that",
    "UnauthenticatedError": "give this process credentials for it, by the store's own variables",
    "InvalidPathError": "use another prefix",
}
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # what S3, GCS and Azure call that
_LOGIN = re.compile(r"://[^/\s]*@")
_QUERY = re.compile(r"\?\S+")
# Options, a login, or a value under a name that others give to a secret: wherever it stands.
_SECRET = re.compile(
    r"[?#]|:.*@|(?<![a-z0-9])"
    r"(?:sig|signature|token|secret|password|credential|(?:[a-z]*access_?|api_?)?key(?:id)?)=",
    re.DOTALL | re.IGNORECASE,
)
# Who has no credentials asks the machine's cloud for some, under these paths.
_METADATA = ("/latest/api/token", "/latest/meta-data/", "/computeMetadata/", "/metadata/identity/")
_memories: dict[str, MemoryStore] = {}  # by name, for as long as the process lives


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a list shows it."""

    key: str
    size_bytes: int


def upload_part_bytes(size_bytes: int) -> int:
    """The size of the parts by which an object of this size is uploaded, in whole MiB."""
    return max(UPLOAD_PART_BYTES, -(-size_bytes // (PARTS_MAX << 20)) << 20)


class ObjectStore:
    """The objects below a URL. Any thread may call it.

    A call ends: no request lasts ten minutes, and none is made again after a minute.

    Raises:
        UsageError: It is no URL of a store, or the extra `bucket` is not installed.
        BucketError: In each call, where the store refuses, or does not answer for a while.
    """

    _failures: tuple[type[Exception], ...]
    _advices = _ADVICE

    def __init__(self, url: str) -> None:
        require_public(url)
        self.url = url
        try:
            import obstore  # noqa: PLC0415  # the extra bucket
            from obstore.exceptions import BaseError  # noqa: PLC0415
        except ImportError as error:
            raise UsageError(
                f"{url!r}: a bucket takes {error.name}, which is not installed: install torch-ros "
                "with the extra bucket"
            ) from error
        self._obs, self._failures = obstore, (BaseError, OSError, ValueError)
        self._folder = _folder(url)
        with self._errors(""):
            self._opened = None if self._folder else _opened(url)
        self._is_in_memory = url.startswith("memory://")

    @property
    def _store(self) -> Vendor:
        """Raises: BucketError: It is a folder, and not there: no reader makes one."""
        if self._folder is not None:
            if not self._folder.is_dir():
                advice = "mount its disk; the first archiver makes it, and no reader"
                raise BucketError(self.url, "", "there is no such folder", advice)
            from obstore.store import LocalStore  # noqa: PLC0415

            self._opened = self._opened or LocalStore(self._folder)
        assert self._opened is not None
        return self._opened

    def make(self, prefix: str) -> None:
        """Have the folder there, and one of this prefix in it. For writers; others have theirs."""
        if self._folder is not None:
            with self._errors(prefix):
                (self._folder / prefix).mkdir(parents=True, exist_ok=True)

    def mark(self, prefix: str) -> None:
        """Have the marker below a prefix. For writers, before anything else; costs a request."""
        self.create(f"{prefix}/{MARKER}", MARK)

    def put(self, key: str, content: Iterable[bytes | memoryview], *, size_bytes: int = 0) -> None:
        """Write an object as its bytes come, under a key that nobody else writes.

        The pieces of `content` must stay as they are until this returns: nothing is copied. The
        object is there when all of it is. Nothing is, if `content` raises, which is raised here.

        Args:
            size_bytes: Of all of it, where that may be more than 78 GiB; see `upload_part_bytes`.

        Cost: Five parts of memory, which are 40 MiB up to 78 GiB.
        """
        sent_bytes = 0

        def counted() -> Iterator[bytes | memoryview]:
            nonlocal sent_bytes
            for piece in content:
                sent_bytes += memoryview(piece).nbytes
                yield piece

        self.make("")
        with self._errors(key):
            try:
                self._obs.put(
                    self._store,
                    key,
                    counted(),
                    use_multipart=True,
                    chunk_size=upload_part_bytes(size_bytes),
                    max_concurrency=UPLOADS,
                )
            except FileNotFoundError:  # the upload: perhaps it is complete, and that reply was lost
                if Listed(key, sent_bytes) not in self.list(key.rpartition("/")[0]):
                    raise

    def create(self, key: str, content: bytes) -> bool:
        """Write a small object if there is none; whether this content is there.

        A store that ignores the condition overwrites, and True is returned: see `probe`.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        self.make("")
        for _ in range(CREATES_MAX):
            with self._errors(key):
                try:
                    self._obs.put(self._store, key, content, mode="create", use_multipart=False)
                except (AlreadyExistsError, PreconditionError):
                    # Perhaps by this very call, whose first reply was lost. If nothing is there, by
                    # another one that was under way, and may have failed.
                    if (there := self.get(key)) is not None:
                        return there == content
                else:
                    return True
        reason = f"it is not there, and cannot be created, {CREATES_MAX} times"
        raise BucketError(self.url, key, reason, "archive this version again")

    def get(self, key: str) -> bytes | None:
        """A small object; None: there is none.

        Raises: UnreadableVersion: It is larger than any that a writer makes, or no file.
        """
        self._require_file(key)
        with self._errors(key):
            try:
                found = self._obs.get(self._store, key)
                self._require_small(key, found.meta["size"])
                return bytes(found.bytes())
            except FileNotFoundError:
                return None

    def _require_small(self, key: str, size_bytes: int) -> None:
        """Memory is taken for all of it."""
        if size_bytes > SMALL_BYTES:
            self.refuse(key, f"it has {size_bytes} bytes, expected at most {SMALL_BYTES}")

    def _require_file(self, key: str) -> None:
        """A read of a FIFO in a folder would wait for who writes to it, with no deadline."""
        if self._folder is not None:
            with self._errors(key), suppress(FileNotFoundError, NotADirectoryError, ValueError):
                mode = (self._folder / key).stat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    self.refuse(key, "it is no file")

    def get_ranges(
        self, key: str, starts: Sequence[int], ends: Sequence[int]
    ) -> Sequence[memoryview]:
        """The bytes of an object between these offsets, in requests at the same time.

        Raises: UnreadableVersion: There is no such object, it ends before, or it is no file.
        """
        self._require_file(key)
        with self._errors(key):
            try:
                found = self._obs.get_ranges(self._store, key, starts=starts, ends=ends, coalesce=0)
            except FileNotFoundError:
                self.refuse(key, "there is no such object")
        views = [memoryview(each) for each in found]
        self._check_ranges(key, views, starts, ends)
        return views

    def _check_ranges(
        self, key: str, views: Sequence[memoryview], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        for view, start, end in zip(views, starts, ends, strict=True):
            if view.nbytes != end - start:
                self.refuse(key, f"it has {start + view.nbytes} bytes, and not {end}")

    def list(self, prefix: str) -> Iterator[Listed]:
        """The objects below a prefix, in the order of their keys. A prefix ends between slashes.

        In a folder also what is being written, or was when its writer was killed: `UNFINISHED`.
        That there are none is believed of a store that also says of the marker, which each writer
        leaves, that it is not there: the list of a page for people has none, either.
        """
        found = self._listed(prefix)
        other = next((one.key for one in found if not one.key.startswith(f"{prefix}/")), None)
        if prefix and other is not None:
            self._doubt(prefix, f"a list of it shows {other!r}, which is not in it")
        if not found and self._is_marked(prefix):
            found = self._listed(prefix)  # a writer may have begun just now
            if not found:
                self._doubt(prefix, f"a list of it is empty, and {MARKER!r} is in it")
        return iter(sorted(found, key=lambda each: each.key))

    def _listed(self, prefix: str) -> Sequence[Listed]:
        with self._errors(prefix):
            found = [*self._pages(prefix, None)]
            while self._folder is None and found and len(found) % PAGE == 0:
                # Some gateways end a list there, and do not say how it goes on.
                last = max(each.key for each in found)
                more = self._pages(prefix, last)
                new = [each for each in more if each.key > last]
                if more and not new:
                    self._doubt(prefix, f"a list of it ends after {len(found)}, and begins anew")
                if not new:
                    break
                found += new
            found += self._unfinished(prefix)
        return found

    def _pages(self, prefix: str, after: str | None) -> Sequence[Listed]:
        pages = self._obs.list(self._store, prefix, offset=after)
        return [Listed(each["path"], each["size"]) for page in pages for each in page]

    def _is_marked(self, prefix: str) -> bool:
        """Whether somebody has written below this prefix of a store that is not a folder.

        Raises: BucketError: No store answers here, or it does not let this process read.
        """
        if self._folder is not None:
            if not any(self._folder.iterdir()):
                advice = "mount its disk; of a new one, start the archiver first"
                raise BucketError(self.url, "", "its folder is empty", advice)
            return False
        said = self._said_of(f"{prefix}/{MARKER}".lstrip("/"))
        if said not in (None, MARK):
            self._doubt(prefix, f"a list of it is empty, and of an object it says {said!r}")
        return said == MARK

    def _said_of(self, key: str) -> bytes | None:
        """The answer to a get, or its beginning; None: a store's own, that nothing is there."""
        with self._errors(key):
            try:
                return bytes(self._obs.get(self._store, key).bytes())[:SHOWN]
            except FileNotFoundError as error:
                # S3, GCS and Azure say it in XML, all with this element.
                said = str(error)
                is_own = "<Code>" in said and not any(each in said for each in _NO_BUCKET)
                return None if self._is_in_memory or is_own else said.encode()[-SHOWN:]

    def _doubt(self, key: str, reason: str) -> NoReturn:
        advice = "check its URL and endpoint: a console, a login page or a proxy is no store"
        raise BucketError(self.url, key, reason, advice)

    def _unfinished(self, prefix: str) -> Iterator[Listed]:
        if self._folder is None:
            return
        for path in (self._folder / prefix).rglob("*#*"):
            if UNFINISHED.fullmatch(path.name):
                with suppress(FileNotFoundError):  # it is finished
                    yield Listed(path.relative_to(self._folder).as_posix(), path.stat().st_size)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; what is not there is fine."""
        for key in keys:
            with self._errors(key), suppress(FileNotFoundError):
                if self._folder and UNFINISHED.fullmatch(key):
                    (self._folder / key).unlink()
                else:
                    self._obs.delete(self._store, key)

    def probe(self, prefix: str) -> bool:
        """Whether this store refuses to create what is there. Leaves nothing behind.

        Raises: BucketError: It cannot be written to, listed, read, or deleted from.
        """
        key = f"{prefix}/probe-{token_hex(8)}"
        self.create(key, b"first")
        try:
            is_refused = not self.create(key, b"second")
            if self.get(key) != (b"first" if is_refused else b"second"):
                self.refuse(key, "a get does not find what was put")
            if key not in {each.key for each in self.list(prefix)}:
                self.refuse(key, "a list does not show what was put")
        finally:
            self.delete([key])
        return is_refused

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raise that an object, or its bytes, are not what they should be."""
        advice = "read another version; archive this one again"
        raise UnreadableVersion(self.url, key, reason, advice)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except TorchRosError:  # of who makes the content
            raise
        except self._failures as error:
            kind = type(error).__name__
            if any(path in str(error) for path in _METADATA):
                kind = "UnauthenticatedError"
            reason = _LOGIN.sub("://...@", (str(error).splitlines() or [kind])[0])
            advice = self._advices.get(kind, "check that the store answers, and its URL")
            made = BucketError(self.url, key, _QUERY.sub("?...", reason), advice)
            # A traceback would repeat what the endpoint's variable has.
            raise made from (None if _LOGIN.search(str(error)) else error)


def require_public(url: str) -> None:
    """A URL ends up in logs and in etcd.

    Raises: UsageError: It has a secret in it, or may have; it is not repeated.
    """
    scheme, is_url, rest = url.partition("://")
    if not is_url:
        if re.match(r"[a-zA-Z0-9]+:/|(s3|gs|az|hf|https?|file|memory):", url):
            raise UsageError(f"a bucket's URL begins with '{scheme.partition(':')[0]}://'")
        return
    plain = rest
    while (decoded := unquote(plain)) != plain:
        plain = decoded
    first = plain.partition("/")[0]
    if "@" in first or ":" in first or _SECRET.search(plain):
        raise UsageError(
            f"'{scheme[:5]}://...' names no store: expected {_FORMS}; a URL ends up in logs and in "
            "etcd, and has no place for keys, ports or options: give credentials and endpoint by "
            "the store's own variables, such as AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, "
            "AZURE_STORAGE_SAS_TOKEN or HF_TOKEN"
        )


def _folder(url: str) -> Path | None:
    """The folder that a URL names; None: another store.

    Raises: UsageError: It names no store.
    """
    if url and "://" not in url:
        return Path(url).absolute()
    parts = urlsplit(url)
    is_folder = parts.scheme == "file" and parts.netloc in {"", "localhost"} and parts.path
    is_other = parts.scheme in {"memory", "s3", "gs", "az"} and parts.netloc
    if not (is_folder or is_other):
        raise UsageError(f"{url!r} names no store: expected {_FORMS}")
    return Path(unquote(parts.path)) if is_folder else None


def _opened(url: str) -> Vendor:
    from obstore import store  # noqa: PLC0415

    if url.startswith("memory://"):
        return _memories.setdefault(url, store.MemoryStore())
    found: Vendor = store.from_url(
        url,
        client_options={
            "allow_http": True,  # the store's own variables have an endpoint of http then
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "read_timeout": timedelta(seconds=READ_S),
            "timeout": timedelta(seconds=REQUEST_S),
        },
        retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
    )
    return found
