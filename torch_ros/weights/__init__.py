"""Layouts, plans and digests of tensors. Knows torch; knows no peer, no store and no version."""
