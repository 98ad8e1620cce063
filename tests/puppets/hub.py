"""The calls of `huggingface_hub` that are about buckets, without a Hub. Never tried against one."""

import functools
import inspect
from pathlib import Path

import httpx2
import huggingface_hub
from huggingface_hub.errors import BucketBatchError, EntryNotFoundError


def as_promised(call):
    """What the real one would not take, this one does not."""
    signature = inspect.signature(getattr(huggingface_hub.HfApi, call.__name__))

    @functools.wraps(call)
    def checked(self, *args, **kwargs):
        signature.bind(self, *args, **kwargs)
        return call(self, *args, **kwargs)

    return checked


class FakeHub:
    """As HfApi; what it has lies on an `ObjectServer`, which answers the requests for ranges."""

    def __init__(self, server):
        self.endpoint, self.server = server.environment["AWS_ENDPOINT_URL"], server

    def found(self, bucket_id, prefix=""):
        at = f"{bucket_id}/resolve/"
        for key, content in sorted(self.server.objects.items()):
            if key.startswith(at + prefix):
                about = {"path": key.removeprefix(at), "size": len(content), "xetHash": "x"}
                yield huggingface_hub.BucketFile(type="file", **about)

    @as_promised
    def list_bucket_tree(self, bucket_id, prefix=None, *, recursive=None):
        assert recursive
        yield from self.found(bucket_id, prefix or "")

    @as_promised
    def get_bucket_paths_info(self, bucket_id, paths):
        wanted = set(paths)
        yield from (each for each in self.found(bucket_id) if each.path in wanted)

    @as_promised
    def batch_bucket_files(self, bucket_id, *, add=(), delete=()):
        for source, path in add:
            content = source if isinstance(source, bytes) else Path(source).read_bytes()
            self.server.objects[f"{bucket_id}/resolve/{path}"] = content
        keys = {path: f"{bucket_id}/resolve/{path}" for path in delete}
        failed = [path for path, key in keys.items() if not self.server.objects.pop(key, None)]
        if failed:
            response = httpx2.Response(200, request=httpx2.Request("POST", self.endpoint))
            error = BucketBatchError("some operations failed", response=response)
            error.failures = [{"path": path, "error": "not found"} for path in failed]
            raise error

    @as_promised
    def download_bucket_files(self, bucket_id, files, *, raise_on_missing_files=False):
        assert raise_on_missing_files
        for path, local in files:
            content = self.server.objects.get(f"{bucket_id}/resolve/{path}")
            if content is None:
                raise EntryNotFoundError(f"1 file(s) not found in bucket '{bucket_id}': {path}")
            Path(local).write_bytes(content)
