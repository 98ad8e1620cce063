"""Checkpoints on disk: published as they lie there, and written from versions."""
