"""Knows what replicas write to etcd and may do; knows no tensor and no transport."""
