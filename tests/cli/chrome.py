"""The Trace Event format, as far as it is documented for readers such as Perfetto."""

from bisect import bisect_right
from collections import defaultdict

KEYS = {  # besides "ph", "name", "pid", "tid": what each phase must have, and may have
    "X": ({"ts", "dur"}, {"args", "cat"}),
    "M": ({"args"}, set()),
    "C": ({"ts", "args"}, {"cat"}),
    "s": ({"ts", "id", "cat"}, {"args"}),
    "f": ({"ts", "id", "cat"}, {"args", "bp"}),
}
NAMED = {"process_name", "thread_name"}


def ns(microseconds):
    """As readers keep it."""
    assert isinstance(microseconds, int | float)
    assert not isinstance(microseconds, bool)
    assert microseconds >= 0
    return round(1000 * microseconds)


def check(trace):
    """Fail unless it is a trace; its slices by (host, row), each row in the order of time."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    assert isinstance(trace["otherData"], dict)
    for event in trace["traceEvents"]:
        _check_event(event)
    names = _names(trace["traceEvents"])
    rows = _rows(trace["traceEvents"])
    for slices in rows.values():
        ends = 0
        for each in slices:
            assert ns(each["ts"]) >= ends, each
            ends = ns(each["ts"]) + ns(each["dur"])
    _check_flows(trace["traceEvents"], rows)
    numbers = [tid or pid for pid, tid in names]
    assert len(numbers) == len(set(numbers))
    return {(names[pid, 0], names[pid, tid]): slices for (pid, tid), slices in rows.items()}


def _check_event(event):
    must, may = KEYS[event["ph"]]
    keys = set(event) - {"ph", "name", "pid", "tid"}
    assert must <= keys <= must | may, event
    assert isinstance(event["name"], str)
    assert event["name"]
    assert all(type(event[key]) is int and event[key] >= 0 for key in ("pid", "tid"))
    assert event["pid"] > 0  # 0 is the kernel's idle task
    if "ts" in event:
        ns(event["ts"])
    if "dur" in event:
        ns(event["dur"])
    if "args" in event:
        assert isinstance(event["args"], dict)
    if event["ph"] == "M":
        assert event["name"] in NAMED
        assert set(event["args"]) == {"name"}
        assert isinstance(event["args"]["name"], str)
    if event["ph"] == "C":
        assert event["args"]
        assert all(type(value) in {int, float} for value in event["args"].values())


def _names(events):
    """Each track, and each row, is named once, before anything is in it."""
    names = {}
    for event in events:
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert place not in names
            assert (event["name"] == "thread_name") == bool(event["tid"])
            names[place] = event["args"]["name"]
        else:
            assert (event["pid"], 0) in names, event
            assert place in names, event
    return names


def _rows(events):
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    for slices in rows.values():
        assert slices == sorted(slices, key=lambda each: ns(each["ts"]))
    return rows


def _check_flows(events, rows):
    """Each has two ends, the first not after the second, both within slices that are there."""
    flows = defaultdict(list)
    seen = set()
    for event in events:
        if event["ph"] == "X":
            seen.add((event["pid"], event["tid"]))
        if event["ph"] in {"s", "f"}:
            assert (event["pid"], event["tid"]) in seen
            flows[event["cat"], event["name"], event["id"]].append(event)
    for ends in flows.values():
        leaves, comes = ends
        assert (leaves["ph"], comes["ph"], comes["bp"]) == ("s", "f", "e")
        assert ns(leaves["ts"]) <= ns(comes["ts"])
        for end in ends:
            assert enclosing(rows, end)["dur"] >= 0


def enclosing(rows, end):
    """The slice in which an end of an arrow lies."""
    at, row = ns(end["ts"]), rows[end["pid"], end["tid"]]
    place = bisect_right(row, at, key=lambda each: ns(each["ts"])) - 1
    assert place >= 0
    assert at < ns(row[place]["ts"]) + ns(row[place]["dur"])
    return row[place]


def arrows(trace):
    """The row from which, and to which, each arrow leads, and the slices at its ends."""
    names, rows = _names(trace["traceEvents"]), _rows(trace["traceEvents"])
    ends = [event for event in trace["traceEvents"] if event["ph"] in {"s", "f"}]
    found = []
    for leaves, comes in zip(ends[::2], ends[1::2], strict=True):
        of = [(names[end["pid"], end["tid"]], enclosing(rows, end)) for end in (leaves, comes)]
        found.append(tuple(of))
    return found


def counters(trace, name):
    """The values that a counter goes through."""
    events = [each for each in trace["traceEvents"] if each["ph"] == "C" and each["name"] == name]
    return [each["args"][name] for each in sorted(events, key=lambda each: each["ts"])]
