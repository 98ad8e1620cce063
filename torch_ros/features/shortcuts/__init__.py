"""Copies straight out of the memory of processes on the same host, by several threads. Without it
TCP or NIXL reads it, at half the speed; all processes of a model have it, or none.
"""
