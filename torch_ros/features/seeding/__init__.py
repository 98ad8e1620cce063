"""Newer versions come into a datacenter while its replicas go on. Without it an update goes to the
newest version wherever that is, and holds nothing until it has crossed a slow link.
"""
