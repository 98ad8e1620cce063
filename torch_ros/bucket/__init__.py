"""Versions in an object store. Knows neither etcd nor transports.

bucket = torch_ros.bucket.open("s3://bucket/prefix", "my-model")
version = bucket.load(model.state_dict(), "latest")
"""

from torch_ros.bucket.buckets import Bucket, open  # noqa: A004
from torch_ros.bucket.deltas import WeightPatch

__all__ = ["Bucket", "WeightPatch", "open"]
