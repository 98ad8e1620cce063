"""Objects in a bucket of the Hugging Face Hub. Knows nothing of versions.

The Hub has no create that refuses, so `probe` says that it overwrites. It takes an upload from a
file or from memory only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch_ros.bucket.objects import READ_S, SHOWN, Listed, ObjectStore, require_public
from torch_ros.errors import UsageError

SCHEME = "hf://"
_ADVICE = "check the bucket's name, the token (HF_TOKEN), and that the Hub answers"


def opened(url: str) -> ObjectStore:
    """The store of a URL: of the Hub, or any other."""
    return HubStore(url) if url.startswith(SCHEME) else ObjectStore(url)


class HubStore(ObjectStore):
    """The objects below hf://buckets/owner/name. Any thread may call it."""

    def __init__(self, url: str) -> None:
        require_public(url)
        self.url, self._folder = url, None
        kind, *names = url.removeprefix(SCHEME).rstrip("/").split("/")
        if kind != "buckets" or len(names) < 2 or not all(names):
            raise UsageError(f"{url!r} names no bucket: expected hf://buckets/owner/name/prefix")
        try:
            from huggingface_hub import HfApi, errors, utils  # noqa: PLC0415  # the extra hub
        except ImportError as error:
            raise UsageError(
                f"{url!r}: a bucket of the Hub takes {error.name}, which is not installed: install "
                "torch-ros with the extra hub"
            ) from error
        self._absent, self._partly = errors.EntryNotFoundError, errors.BucketBatchError
        # Of HTTP, for want of a path, of its uploads, and of files.
        http = errors.HTTPError  # type: ignore[attr-defined]
        self._failures = (http, self._absent, RuntimeError, OSError, ValueError)
        self._http: Any = utils  # which does not say what it exports
        self._advices = dict.fromkeys(("HfHubHTTPError", "BucketNotFoundError"), _ADVICE)
        self._hub, self._bucket = HfApi(), "/".join(names[:2])
        self._prefix = "".join(f"{name}/" for name in names[2:])

    def put(self, key: str, content: Iterable[bytes | memoryview], *, size_bytes: int = 0) -> None:
        """As others; takes as much of the disk for temporary files as the object is large."""
        del size_bytes
        with tempfile.NamedTemporaryFile() as file:
            for piece in content:
                with self._errors(key):
                    file.write(piece)
            with self._errors(key):
                file.flush()
                self._upload(Path(file.name), key)

    def create(self, key: str, content: bytes) -> bool:
        """Write a small object; the Hub cannot refuse that."""
        with self._errors(key):
            self._upload(content, key)
        return True

    def _upload(self, source: Path | bytes, key: str) -> None:
        self._hub.batch_bucket_files(self._bucket, add=[(source, self._prefix + key)])

    def get(self, key: str) -> bytes | None:
        """As others; takes as much of the disk as the object is large."""
        with self._errors(key), tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "object"
            try:
                self._hub.download_bucket_files(
                    self._bucket, [(self._prefix + key, file)], raise_on_missing_files=True
                )
            except self._absent:
                return None
            self._require_small(key, file.stat().st_size)
            return file.read_bytes()

    def get_ranges(
        self, key: str, starts: Sequence[int], ends: Sequence[int]
    ) -> Sequence[memoryview]:
        """As others, one after the other: readers have several threads."""
        with self._errors(key):
            try:
                found = [self._range(key, *each) for each in zip(starts, ends, strict=True)]
            except self._absent:
                self.refuse(key, "there is no such object")
        self._check_ranges(key, found, starts, ends)
        return found

    def _range(self, key: str, start: int, end: int) -> memoryview:
        path = quote(self._prefix + key)
        url = f"{self._hub.endpoint}/buckets/{self._bucket}/resolve/{path}"
        headers = {**self._http.build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
        reply = self._http.http_backoff("GET", url, headers=headers, timeout=READ_S)
        self._http.hf_raise_for_status(reply)
        return memoryview(reply.content)

    def _listed(self, prefix: str) -> Sequence[Listed]:
        below = f"{self._prefix}{prefix}"
        with self._errors(prefix):
            return [
                Listed(each.path.removeprefix(self._prefix), each.size)
                for each in self._hub.list_bucket_tree(self._bucket, below, recursive=True)
                if each.type == "file" and each.path.startswith(f"{below}/")
            ]

    def _said_of(self, key: str) -> bytes | None:
        said = self.get(key)
        return None if said is None else said[:SHOWN]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; what is not there is fine."""
        paths = [self._prefix + key for key in keys]
        with self._errors(", ".join(paths[:1])):
            try:
                self._hub.batch_bucket_files(self._bucket, delete=paths)
            except self._partly:
                if [*self._hub.get_bucket_paths_info(self._bucket, paths)]:
                    raise
