"""Trainers and engines of others, and where these put tensors. Knows the public API alone."""
