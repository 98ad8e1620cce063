"""Streams of bytes over sockets of our own: nothing but registered memory can be read through them,
no reader ends its source, and beyond a host everything is encrypted.
"""
