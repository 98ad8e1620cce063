"""Copies of tensors that are published in their place. Knows no calls, no versions and no etcd."""
