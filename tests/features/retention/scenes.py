"""Scenes of readers in other datacenters, and of what a datacenter retains for itself."""

from features.retention import afar, here

__all__ = ["afar", "here"]
