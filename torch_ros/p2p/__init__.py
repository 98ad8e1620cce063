"""Moves bytes between processes. Knows no tensor, no model and no etcd."""
