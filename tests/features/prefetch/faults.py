"""Faults to plant where deltas are staged before an update."""

from faults import fault

from torch_ros.codec import delta


@fault(
    "changes are kept before the word of their source is asked",
    "DeltaRead._certify",
    "Delta.received",  # checksums would refuse them, too
    scenario="prefetch rewritten",
)
def _(was):
    if getattr(was, "__self__", None) is delta.Delta:
        return classmethod(lambda cls, elements, *arrays: cls(elements, *arrays))
    return lambda self, ranks: None


@fault(
    "what is prefetched outlives its base",
    "Prefetching._check",
    "Ahead.keep",
    "Prefetched.leads",
    scenario="prefetch in vain",
)
def _(was):
    match was.__name__:
        case "_check":
            return lambda self, turn, deadline: deadline.check_open()
        case "keep":
            return lambda self, found, turn: was(self, found, self.turn)
    return lambda self, base, ref: self.ref.uid == ref.uid


fault(
    "what is prefetched is told by its number", "Prefetched.leads", scenario="prefetch of another"
)(
    lambda leads: (
        lambda self, base, ref: (
            self.base.registered is base.registered and self.ref.version == ref.version
        )
    )
)
