"""The links that `torch-ros doctor --links` has probed, and which of them are slow. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from torch_ros.cli.doctor import Finding

SLOW = 3  # times below the median
HEADER = ("REPLICA", "HOST", "WAY", "GB/s", "")


@dataclass(frozen=True, slots=True)
class Link:
    """The way from a replica to this process.

    Attributes:
        way: "copied", within this host; or the device on which most of the bytes came.
        problem: Why it was not probed.
    """

    replica: str
    host: str
    way: str = ""
    bytes_per_s: float = 0.0
    problem: str = ""


def ranked(links: Sequence[Link]) -> Sequence[Link]:
    """The fastest first."""
    return sorted(links, key=lambda link: (-link.bytes_per_s, link.replica))


def times_below(link: Link, links: Sequence[Link]) -> float:
    """How often its rate goes into the median of those of its kind; 0: there is no rate.

    Copies within a host are compared with each other.
    """
    is_copied = link.way == "copied"
    kind = [each.bytes_per_s for each in links if each.way and is_copied == (each.way == "copied")]
    return median(kind) / link.bytes_per_s if link.bytes_per_s else 0.0


def slow(links: Sequence[Link]) -> Iterator[Finding]:
    """A warning for each link that is far below the others."""
    for link in links:
        times = times_below(link, links)
        if link.problem:
            found = f"link from {link.replica} at {link.host}: {link.problem}"
            yield Finding("warn", found, "a source that can be read")
        elif times >= SLOW:
            found = f"link from {link.replica} at {link.host}, {link.way}: {_rate(link)} GB/s"
            way_out = f"UCX_NET_DEVICES and fabric at both ends; run this at {link.host} too"
            yield Finding("warn", found, f"the median, which is {times:.0f} times that", way_out)


def rows(links: Sequence[Link]) -> list[Sequence[str]]:
    """A line for each."""
    found: list[Sequence[str]] = []
    for link in ranked(links):
        times = times_below(link, links)
        note = link.problem or (f"<- {times:.0f}x below the median" if times >= SLOW else "")
        found.append((link.replica, link.host, link.way or "-", _rate(link), note))
    return found


def _rate(link: Link) -> str:
    return f"{link.bytes_per_s / 1e9:.3g}" if link.bytes_per_s else "-"
