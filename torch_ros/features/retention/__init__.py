"""The last copy of a version that is retained, or read from afar, stays: in host memory.

Without it a version goes with its last holder, and every reader is waited for, however far it is.
"""
