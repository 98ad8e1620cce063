"""Tensors of a version, one after the other. Without it a version is read whole, or in parts."""
