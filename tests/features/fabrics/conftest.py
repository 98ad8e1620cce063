"""Processes that are told what to do, as for the tests of other transports."""

from p2p.conftest import spawn, spawn_for_all

__all__ = ["spawn", "spawn_for_all"]
