"""Huge pages under registered memory. Without them, peers on this host take twice as long to copy
it.
"""
