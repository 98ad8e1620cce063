"""Whatever anybody writes to etcd, a rule ends with an answer or an error of ours; and garbage of
others changes no answer. `TORCH_ROS_FUZZ=n` tries n times as much.
"""
# needs features pace

import dataclasses
import os
from functools import partial

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_ros.errors import BackendError, TorchRosError
from torch_ros.features.pace.rules import SlowOnes
from torch_ros.features.retention import copying
from torch_ros.features.retention.copying import CopiedPart, LastCopies
from torch_ros.features.retention.rules import keeping
from torch_ros.protocol import calls, membership, records, sources, unpublish
from torch_ros.protocol import keys as k
from torch_ros.protocol.applicant import Applicant
from torch_ros.protocol.keeping import GivenUp
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.versions import Spec, listing, resolve
from torch_ros.store.loops import Act, Done, Wait, WaitAtMost
from torch_ros.store.txn import Entry, View

TIMES = int(os.environ.get("TORCH_ROS_FUZZ", "1"))
MODEL = Keys("m")
OWN, REF, V = "r@1", records.VersionRef("run", 1, "u", 1), records.VersionRecord("u", "L")
SHARD = records.ShardRecord("h", 1, b"card")
RESTS = {"pace": msgspec.Raw(b'"rests"')}
CALL = records.Call(1, "replicate", records.Asked("replicate", 1), 0, REF, ["t@1"], more=RESTS)
KEPT = records.Kept(REF, 1, "L", is_original=True)
CHECK = records.Asked("update", "latest").check
FAILED = records.Call(
    2, "update", CHECK, outcome=records.Outcome(records.Failure("UsageError", ["x"], 0))
)
DECIDED = records.Decisions([CALL, FAILED])

MINE = {
    MODEL.group("r"): records.GroupRecord("1", 1, "run", is_complete=True),
    MODEL.decisions(OWN): DECIDED,
    MODEL.shard(OWN, 0): SHARD,
    MODEL.holding("run", 1, "default", OWN): records.Holding("u", 1, "filling", 1),
    MODEL.version("run", 1): V,
}
WELL = {
    MODEL.group("t"): records.GroupRecord("1", 1, "run", is_complete=True, retain=["latest"]),
    MODEL.shard("t@1", 0): SHARD,
    MODEL.run("run"): records.RunRecord("h:1", 1),
    MODEL.holding("run", 1, "default", "t@1"): records.Holding("u", 1, "full", 1, is_original=True),
    MODEL.reader("run", 1, "t@1", OWN, 0): records.Reader(1),
}
OTHERS = {
    MODEL.group("z"): records.GroupRecord("1", 1, "run", is_complete=True, retain=["latest-1"]),
    MODEL.shard("z@1", 0): msgspec.structs.replace(SHARD, kept=KEPT, ended=[CALL]),
    MODEL.run("other"): records.RunRecord("h:1", 2),
    MODEL.version("run", 2): records.VersionRecord("u2", "L"),
    MODEL.version("other", 1): V,
    MODEL.holding("run", 1, "default", "z@1"): records.Holding("u", 3, "full", 1),
    MODEL.holding("run", 2, "default", "z@1"): records.Holding("u2", 3, "full", 1),
    MODEL.reader("run", 1, "z@1", OWN, 0): records.Reader(1),
    MODEL.reader_group("run", 1, OWN, "z@1"): records.Reader(1),
    MODEL.suspect("t@1", "z@1"): records.Suspect("x"),
    MODEL.seen_at("z", 0): records.SeenRecord("h", 1, 5, "boot", 1, 2),
    MODEL.ready("z@1", 1, 0): records.Ready("L"),
    MODEL.ready(OWN, 1, 7): records.Ready("L"),
}
EVERY = (*MINE.items(), *WELL.items(), *OTHERS.items())
RULED = {"leaves": SlowOnes(), "keeper": LastCopies()}
SEAT = Seat(MODEL, "r", "1", 0, 1, "run", 1, 7, "default", False, 60.0, **RULED)
WHO = Applicant(
    MODEL, "n", 0, 1, SHARD, None, "default", False, lease_id=9, nonce="2", fresh_run="fresh"
)


def fuzz(examples):
    return settings(
        max_examples=examples * TIMES,
        deadline=None,
        database=None,
        derandomize=TIMES == 1,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def mutated(draw, whole):
    """Bytes that were cut, changed or grown somewhere; or some others."""
    kind = draw(st.integers(0, 5))
    at, junk = draw(st.integers(0, len(whole))), draw(st.binary(max_size=8))
    end = draw(st.integers(at, len(whole)))
    numbers = (b"-1", b"9" * 30, b"9" * 5000, b"null", b"[" * 3000, b"1e400", b'"\xff"', b"1.5")
    match kind:
        case 0:
            return draw(st.binary(max_size=40))
        case 1:
            return whole[:at]
        case 2:
            return whole.replace(b"1", draw(st.sampled_from(numbers)), 1)
        case 3:
            return whole.replace(b'"', b'"' + junk, 1)
    return whole[:at] + junk + whole[end:]


records_ = st.sampled_from(EVERY).flatmap(
    lambda item: st.tuples(st.just(item[0]), mutated(item[1].encode()), st.just(type(item[1])))
)
keys_ = st.sampled_from([key for key, _ in EVERY]).flatmap(lambda key: mutated(key.encode()))


@fuzz(120)
@given(records_)
def test_what_decodes_can_be_written_again(case):
    key, value, kind = case
    try:
        record = kind.decode(value, key)
    except BackendError as error:
        assert key in str(error)
    else:
        assert kind.decode(record.encode(), key) == record
        if isinstance(record, records.Decisions):
            for call in record.calls:
                if call.outcome and call.outcome.failure:
                    assert isinstance(call.outcome.failure.error(), TorchRosError)


@fuzz(100)
@given(keys_)
def test_a_key_that_parses_is_one_that_we_write(raw):
    key = raw.decode(errors="surrogateescape")
    made = {
        key: True,
        **({MODEL.run(name): True} if (name := k.parse_run(key)) else {}),
        **({MODEL.version(*where): True} if (where := k.parse_version(key)) else {}),
    }
    if held := k.parse_holding(key):
        made[MODEL.holding(held.run, held.version, held.datacenter, held.inst)] = True
    tails = {made_.split("/", 3)[-1] for made_ in made}
    assert len(tails) == 1
    for parse in (
        k.parse_reader,
        k.parse_suspect,
        k.parse_rank,
        k.parse_group,
        k.parse_retain,
        k.parse_seen,
    ):
        parse(key)


def view_of(*parts):
    entries = {}
    for part in parts:
        for key, value in part.items():
            raw = value.encode() if isinstance(value, records.Record) else value
            rev = len(entries) + 2
            entries[key] = Entry(raw, rev, rev, 0)
    return View(100, entries)


def effects(rule, **options):
    return partial(
        calls.find_or_decide,
        seat=SEAT,
        call=records.Call(3, "publish", records.Asked("x"), SEAT.rank),
        effects=partial(rule, **options),
    )


OLDER = records.VersionRef("run", 0, "v", 1)
RULES = {
    "list": lambda view: Done(listing(view, MODEL)),
    **{
        f"resolve {version}": lambda view, v=version: resolve(view, MODEL, Spec.parse(v))
        for version in ("latest", "latest-1", 1, 2, 3)
    },
    "keep": lambda view: keeping(view, MODEL, REF, GivenUp(OWN, "default")),
    "keep an older": lambda view: keeping(view, MODEL, OLDER, GivenUp(OWN, "default")),
    "publish": effects(calls.announce_version, version=3, fresh_uid="new"),
    "replicate": effects(calls.announce_filling, spec=Spec(), is_relay=True),
    "claim": lambda view: sources.claim(view, SEAT, CALL),
    "attach": lambda view: sources.attach_claimed(view, SEAT, CALL, "t@1"),
    "attach to another": lambda view: sources.attach_claimed(view, SEAT, CALL, "z@1"),
    "complete": lambda view: calls.complete(view, SEAT, CALL, records.Outcome(said="L")),
    "readies": lambda view: calls.readies(view, SEAT, CALL),
    "unpublish": lambda view: unpublish.unpublish(
        view, SEAT, records.Call(3, "unpublish", records.Asked("unpublish"), 0), REF
    ),
    "show_copy": lambda view: copying.show_copy(view, SEAT, KEPT, CopiedPart("r+3@1", 3, SHARD)),
    "release": lambda view: copying.release(view, SEAT, REF, OWN),
    "abort": lambda view: calls.abort(
        view,
        SEAT,
        records.Call(1, "agree", records.Asked("x"), 0),
        records.Failure("UsageError", ["x"], 0),
    ),
    "find": lambda view: membership.find_group(view, WHO),
    "open": lambda view: membership.create_group(view, WHO),
    "join": lambda view: membership.join(view, dataclasses.replace(WHO, replica="r"), "1"),
    "watch": lambda view: membership.watch_over(view, SEAT),
    "expel": lambda view: membership.expel(view, SEAT),
    "leave": lambda view: membership.leave(view, SEAT, 5),
}


# By their keys alone; or they are what a rule asks for.
BELIEVED = ("/readers/", "/suspects/", "/ready/", "/version", "z@1/000000")


def said(rule, view):
    """What a rule answers, without what a guard on garbage may say."""
    try:
        step = rule(view)
    except TorchRosError as error:
        return type(error), str(error)
    if isinstance(step, WaitAtMost):
        step = step.wait
    match step:
        case Act(txn, _):
            return txn.ops
        case Done(value):
            return value
        case Wait(reason, ranges):
            return reason, ranges
    return step


@pytest.mark.parametrize("name", RULES)
@fuzz(4)
@given(st.lists(st.tuples(keys_, records_), min_size=1, max_size=4))
def test_a_rule_ends_with_an_answer_or_an_error_of_ours(name, junk):
    found = {raw.decode(errors="surrogateescape"): case[1] for raw, case in junk}
    found |= {key: value for _, (key, value, _) in junk}
    said(RULES[name], view_of(MINE, WELL, OTHERS, found))


@pytest.mark.parametrize("name", [name for name in RULES if name != "attach to another"])
@fuzz(4)
@given(st.lists(st.tuples(st.sampled_from(list(OTHERS)), keys_, st.binary(max_size=9)), max_size=4))
def test_garbage_of_others_changes_no_answer(name, junk):
    garbage = {}
    for key, raw, value in junk:
        other = raw.decode(errors="surrogateescape")
        prefix = "/".join(key.split("/")[:4])
        garbage[f"{prefix}/{other}/\udcff"] = value
        if not any(part in key for part in BELIEVED):
            garbage[key] = b"\xff" + value
    rev = {**MINE, **WELL}
    clean, dirty = view_of(rev), view_of(rev, garbage)
    assert _plain(said(RULES[name], dirty)) == _plain(said(RULES[name], clean))


def _plain(answer):
    """Without guards: those on garbage are others."""
    return str(getattr(answer, "is_needed", answer))
