"""A handle that closes first gives another holder what only its replica has.

Without it a handle closes at once, no `leave` lets readers finish, and no bucket is waited for.
"""
