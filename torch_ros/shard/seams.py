"""The seams at which features meet a shard: docs/ARCHITECTURE.md#features.

The core calls them, and names no feature. A feature has those that it needs.
"""


class Feature:
    """Told of what happens to the shard that it is attached to. Each method does nothing here.

    Called in the order in which features were attached, by the thread that makes the call under
    way, unless a method says otherwise.
    """

    def closes(self) -> None:
        """The handle is about to be closed, and all is as it was. Any thread calls."""

    def has_closed(self) -> None:
        """Nothing is shown any more, and no call is under way; the transport goes next."""
