"""Versions, or parts of them, read into any tensors, and offered only when told to. Without it a
replica serves what it has read from the beginning, and nobody sees what a version consists of.
"""
