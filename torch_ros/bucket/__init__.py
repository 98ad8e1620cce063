"""Versions in an object store. Knows neither etcd nor transports."""
