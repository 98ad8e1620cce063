"""Copies that processes of this host use where they lie. Without it each of them reads its own."""
