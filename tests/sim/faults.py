"""Faults to plant in the protocol. A simulator that does not notice them proves nothing.

Each is what somebody might write who had not understood a rule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import collecting  # noqa: F401  # its scenes are among those that find faults, as are these:
import msgspec
import numpy as np
import parts  # noqa: F401
import seeding  # noqa: F401
from collected import collect
from planting import changed

from torch_ros.protocol import call as call_module
from torch_ros.protocol import (
    calls,
    ledger,
    membership,
    records,
    seat,
    sources,
    unpublish,
    versions,
)
from torch_ros.protocol import keys as keys_module
from torch_ros.protocol import seat as seat_module
from torch_ros.protocol.life import CallLife
from torch_ros.protocol.meeting import Meeting
from torch_ros.store.loops import Act, Done, Wait, WaitAtMost
from torch_ros.store.txn import (
    UNKNOWN,
    Commit,
    Count,
    Created,
    Delete,
    Empty,
    Get,
    NoneNewer,
    Put,
    Reply,
    Txn,
    Unchanged,
    View,
)
from torch_ros.transfer import feed
from torch_ros.transfer.card import ALL_BLOCKS
from torch_ros.weights import manifest


@dataclass(frozen=True)
class Fault:
    what: str
    plant: Callable  # a context manager
    scenario: str = ""  # the one that finds it; "": the simulator does


FAULTS: dict[str, Fault] = {}


def fault(what: str, *rules: str, scenario: str = "") -> Callable:
    """Register a replacement for each of `rules`, made from the original: see planting.py."""

    def register(change: Callable) -> Callable:
        @contextmanager
        def plant():
            with ExitStack() as stack:
                for rule in rules:
                    stack.enter_context(changed(rule, change))
                yield

        assert what not in FAULTS
        FAULTS[what] = Fault(what, plant, scenario)
        return change

    return register


def instead(what: str, *rules: str, scenario: str = "") -> Callable:
    """Register a function that is called in place of `rules`, with the original first."""

    def register(faulty: Callable) -> Callable:
        def change(rule):
            return lambda *args, **kwargs: faulty(rule, *args, **kwargs)

        return fault(what, *rules, scenario=scenario)(change)

    return register


def answers(what: str, *rules: str, value: object = None, scenario: str = "") -> None:
    """Register a fault in which `rules` give that value, whatever they are asked."""
    fault(what, *rules, scenario=scenario)(lambda _: lambda *_, **__: value)


# Changes to the transactions of a rule


def edited(guards=lambda guard: True, ops=lambda op: op) -> Callable:
    """Keep only some guards of the transactions of a rule, and change or drop its operations."""

    def edit(step):
        if isinstance(step, WaitAtMost):
            return msgspec.structs.replace(step, otherwise=edit(step.otherwise))
        if not isinstance(step, Act):
            return step
        kept = tuple(filter(guards, step.txn.guards))
        done = tuple(new for old in step.txn.ops if (new := ops(old)) is not None)
        return Act(msgspec.structs.replace(step.txn, guards=kept, ops=done), step.then)

    def change(rule):
        @functools.wraps(rule)
        def faulty(*args, **kwargs):
            return edit(rule(*args, **kwargs))

        return faulty

    return change


def not_on(part: str) -> Callable:
    kinds = (Unchanged, Created)
    return lambda guard: not (isinstance(guard, kinds) and f"/{part}/" in guard.key)


def without(*kinds: type) -> Callable:
    return lambda guard: not isinstance(guard, kinds)


def spare(part: str) -> Callable:
    """Delete nothing there."""
    return lambda op: None if isinstance(op, Delete) and f"/{part}/" in op.range.start else op


def said(view: View, old: bytes, new: bytes, part: str = "/holdings/") -> View:
    """The view, if its records said something else."""
    entries = {
        key: msgspec.structs.replace(entry, value=re.sub(old, new, entry.value))
        if part in key
        else entry
        for key, entry in view.entries.items()
    }
    return msgspec.structs.replace(view, entries=entries)


def unseen(view: View, *keys: str) -> View:
    entries = {key: entry for key, entry in view.entries.items() if key not in keys}
    return msgspec.structs.replace(view, entries=entries)


def without_moment(op):
    """Write a version's record as if nobody knew when it was published."""
    if not isinstance(op, Put) or "/versions/" not in op.key:
        return op
    record = records.VersionRecord.decode(op.value, op.key)
    return msgspec.structs.replace(op, value=msgspec.structs.replace(record, at_ms=0).encode())


fault("who completes a publication forgets when it began", "calls:complete")(
    edited(ops=without_moment)
)


@instead("a rank that comes back does not know the span of its version", "Kept.of")
def _(of, *args):
    return msgspec.structs.replace(of(*args), traceparent="")


@instead("a decision keeps its own span, not the version's", "VersionRecord.brought_by")
def _(brought_by, record, call, ref):
    return msgspec.structs.replace(brought_by(record, call, ref), traceparent="")


@instead("ranks that come back forget when their version was published", "_adopt")
def _(adopt, *args):
    ops, guards = adopt(*args)
    return [without_moment(op) for op in ops], guards


# Names and calls

fault("an incarnation has no nonce in its name", "instance")(
    lambda instance: lambda replica, nonce: instance(replica, "0")
)
fault(
    "ready records without the call's number", "Keys.ready", "Keys.readies", scenario="ready before"
)(lambda name: lambda self, inst, call, *rank: name(self, inst, 0, *rank))
fault("a nonce is tried again when the reply is lost", "_at_most_once", scenario="same nonce")(
    lambda once: lambda create: create
)
fault("decisions are not guarded", "group_txn")(
    lambda make: (
        lambda *args: msgspec.structs.replace(
            txn := make(*args), guards=tuple(filter(not_on("decisions"), txn.guards))
        )
    )
)


@instead("decisions hang on the lease of who decides", "group_txn")
def _(make, view, seat, *args):
    txn = make(view, seat, *args)
    first = msgspec.structs.replace(txn.ops[0], lease_id=seat.lease_id)
    return msgspec.structs.replace(txn, ops=(first, *txn.ops[1:]))


@instead("an abort is told to nobody", "abort")
def _(rule, view, seat, made, failure):
    step = rule(view, seat, made, failure)
    return Done(step.then(UNKNOWN)) if isinstance(step, Act) else step


@instead("an abort undoes a call that has ended", "abort")
def _(rule, view, seat, made, failure):
    step = rule(view, seat, made, failure)
    if isinstance(step, Done) and step.value.outcome.failure is None:
        unended = msgspec.structs.replace(step.value, outcome=None)
        with changed("recall", lambda _: lambda *_: unended):
            return rule(view, seat, made, failure)
    return step


fault("an aborted call leaves its holding", "_undo")(lambda undo: lambda seat, call: ())


@instead("the second rank decides again", "find_or_decide")
def _(rule, view, seat, call, effects, seen):
    found = calls.find(view, seat, call.number)
    if found is None or found.by == seat.rank or found.outcome is not None:
        return rule(view, seat, call, effects, seen)
    others = [c for c in seat_calls(view, seat) if c.number != call.number]
    entry = msgspec.structs.replace(
        view.entries[seat.decisions], value=records.Decisions(others).encode()
    )
    entries = {**view.entries, seat.decisions: entry}
    return rule(msgspec.structs.replace(view, entries=entries), seat, call, effects, seen)


def seat_calls(view, at):
    return seat.calls_of(view, at)


fault("most ranks do not look what was decided", "look_up", "find_or_decide")(
    lambda rule: lambda view, seat, **kwargs: rule(unseen(view, seat.decisions), seat, **kwargs)
)


@instead("ready: counted before it is put", "put_ready")
def _(rule, *args, **kwargs):
    step = rule(*args, **kwargs)
    if not isinstance(step, Act):
        return step
    ops = sorted(step.txn.ops, key=lambda op: not isinstance(op, Count))
    txn = msgspec.structs.replace(step.txn, ops=tuple(ops))
    return msgspec.structs.replace(step, txn=txn)


@instead(
    "ready: a repeat after a lost reply waits for the peers", "put_ready", scenario="last reply"
)
def _(rule, view, seat, call, *args, **kwargs):
    key = seat.keys.ready(seat.inst, call.number, seat.rank)
    return Done(0) if key in view.entries else rule(view, seat, call, *args, **kwargs)


@instead("all ranks say they are the last", "put_ready", "readies")
def _(rule, view, seat, call, *args, **kwargs):
    step = rule(view, seat, call, *args, **kwargs)
    if isinstance(step, Act):
        return msgspec.structs.replace(step, then=lambda _: 99)
    if step == Done(None):
        found = [
            records.Ready.decode(entry.value, key).value
            for key, entry in view.within(seat.keys.readies(seat.inst, call.number))
        ]
        return Done(records.Said({seat.rank: found[0]})) if found else step
    return step


def overheard(steps, asked=lambda request: request, answered=lambda request, reply: reply):
    """A loop of the store whose requests, or their replies, are changed on the way."""
    reply = None
    while True:
        try:
            request = steps.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = answered(request, (yield asked(request)))


@fault("a lost reply counts as done", "settle", scenario="lost request")
def _(settle):
    def answered(request, reply):
        if not (isinstance(request, Commit) and reply is UNKNOWN):
            return reply
        asked = [op for op in request.txn.ops if isinstance(op, Get | Count)]
        nothing = tuple({} if isinstance(op, Get) else 0 for op in asked)
        return Reply(applied=True, rev=0, results=nothing)

    return lambda *args: overheard(settle(*args), answered=answered)


@instead("a watch begins one revision late", "Space.has_changed", scenario="looks away")
def _(has_changed, self, watch):
    # Not later than now: that would be told at once, as after a wipe.
    late = watch.after_rev + (watch.after_rev < self.rev)
    return has_changed(self, msgspec.structs.replace(watch, after_rev=late))


@instead("who lost a race looks at what it saw before", "settle", scenario="two trainers")
def _(settle, what, ranges, rule, first=None, *ahead):
    seen = first

    def answered(_, reply):
        nonlocal seen
        if isinstance(reply, View):
            seen = reply
        elif isinstance(reply, Reply) and reply.view is not None:
            return msgspec.structs.replace(reply, view=seen)
        return reply

    return overheard(settle(what, ranges, rule, first, *ahead), answered=answered)


# Versions

fault("publish: newer versions are not guarded", "announce_version", scenario="two trainers")(
    edited(guards=without(NoneNewer))
)
fault("publish: the version's record is not guarded", "announce_version", scenario="two trainers")(
    edited(guards=not_on("versions"))
)


@instead(
    "a number keeps its uid when nobody holds it", "_fellow_publisher", scenario="published again"
)
def _(fellow, view, seat, version):
    key = seat.keys.version(seat.run, version)
    return fellow(view, seat, version) or (key if key in view.entries else "")


@instead("a number that only readers hold is published again", "_fellow_publisher")
def _(fellow, view, seat, version):
    try:
        return fellow(view, seat, version)
    except calls.VersionConflict:
        return ""


@fault("an error is decided from what the last call saw", "find_or_decide", scenario="seen before")
def _(rule):
    return lambda *args, **named: rule(*args, **{**named, "seen": None})


# Samples of what there is


answers("what a sample leaves out is taken for absent", "View.shows", value=True)


fault("a glimpse of who fills it is enough", "_glimpsed", scenario="few, not whole")(
    lambda glimpsed: lambda view, keys, spec: glimpsed(said(view, b"filling", b"full"), keys, spec)
)
fault("a glimpse of an older version is enough", "newest_record")(
    lambda newest: (
        lambda view, keys: min(
            (ref for ref, _ in versions._records(view, keys)), key=lambda r: r.order, default=None
        )
    )
)
fault("the next older one is read from, whoever reads it", "_by_place", scenario="fed already")(
    lambda rule: (
        lambda birth, candidates: rule(
            birth, {i: dataclasses.replace(found, readers=0) for i, found in candidates.items()}
        )
    )
)
fault("everyone reads from the oldest", "_by_place", scenario="fed already")(
    lambda rule: lambda birth, candidates: min(candidates, key=lambda inst: candidates[inst].born)
)


fault("a draining source is offered", "versions:offered", scenario="not whole")(
    lambda offered: lambda view, keys: offered(said(view, b"draining", b"full"), keys)
)
fault("a filling replica is offered", "versions:offered", scenario="not whole")(
    lambda offered: lambda view, keys: offered(said(view, b"filling", b"full"), keys)
)


@fault("a wait for a version watches only the own calls", "_wait_for_version")
def _(rule):
    return lambda *args: Wait(rule(*args).reason, ())


@instead(
    "who completes a call relies on another to offer the version",
    "calls:complete",
    scenario="last offer",
)
def _(rule, view, *, seat, **kwargs):
    own = lambda guard: "/holdings/" not in str(guard) or seat.inst in str(guard)
    return edited(guards=own)(rule)(view, seat=seat, **kwargs)


@instead(
    "of what has changed while somebody waits one thing is seen",
    "View.after",
    scenario="last change",
)
def _(after, view, changes):
    one_thing = dict(list(changes.entries.items())[:1])
    return after(view, msgspec.structs.replace(changes, entries=one_thing))


def awake(op):
    return None if isinstance(op, Put) and "/versions/" in op.key else op


fault(
    "who waits for a version does not see that a replica comes back", "join", scenario="comes back"
)(edited(ops=awake))


# Sources


@instead("a younger replica is a source", "_is_source")
def _(rule, *args):
    *others, _ = args
    return rule(*others, math.inf)


fault(
    "attach: the source's processes are not counted",
    "sources:offered",
    "claim",
    scenario="half dead",
)(
    lambda rule: (
        lambda view, *others, **more: rule(
            said(view, rb'"world_size":\d+', b'"world_size":1'), *others, **more
        )
    )
)


@instead(
    "summing up: a rank that is gone has nothing", "Manifests._own_shards", scenario="half there"
)
def _gone_has_nothing(_, self, deadline):
    return self.shards(self._group.seat.inst, deadline)


@instead("a claim is not guarded on nobody being there", "claim_of", scenario="freed meanwhile")
def _(claim_of, *args, **kwargs):
    guards, put = claim_of(*args, **kwargs)
    return tuple(filter(without(Empty), guards)), put


fault("birth order does not predict", "_first_choice", scenario="burst")(
    lambda rule: (
        lambda view, seat, ref, before, candidates: sources.best_of(
            candidates, sources.suspects(view, seat.keys)
        )
    )
)


fault("who was lost is a reader still", "candidates_of", scenario="place of the dead")(
    lambda rule: lambda view, seat, ref, before, lost=(): rule(view, seat, ref, before)
)


@instead("a suspicion is a verdict", "candidates_of", scenario="flaky")
def _(rule, view, seat, ref, before, lost=()):
    bad = sources.suspects(view, seat.keys)
    found = rule(view, seat, ref, before, lost)
    return {inst: candidate for inst, candidate in found.items() if inst not in bad}


@fault("a near source is a preference", "eligible_of", scenario="burst across")
def _(rule):
    return lambda view, seat, ref, candidates, tried: candidates


@instead("a suspicion counts more than a datacenter", "eligible_of", scenario="suspected seed")
def _(rule, view, seat, ref, candidates, tried):
    bad = sources.suspects(view, seat.keys)
    good = {inst: found for inst, found in candidates.items() if inst not in bad}
    return rule(view, seat, ref, good or candidates, tried)


@instead("a far trainer is as good as its copies", "_far", scenario="far copies")
def _(rule, candidates):
    originals = {i: found for i, found in candidates.items() if found.holding.is_original}
    return originals or rule(candidates)


fault("who reads from afar reads from whom does too", "_far", scenario="third datacenter")(
    lambda rule: lambda candidates: candidates
)


@instead("a mute source is left for a far one", "is_to_be_left", scenario="mute seed")
def _(rule, *args):
    *others, candidates = args
    near = {inst: dataclasses.replace(it, distance=0) for inst, it in candidates.items()}
    return rule(*others, near)


def _sees_all(rule, *args, **kwargs):
    with changed("shows_whole", lambda _: lambda *_: True):
        return rule(*args, **kwargs)


instead(
    "of those who fill, one that streams concludes that nobody else is full",
    "Sources.has_other",
    scenario="mute stream",
)(_sees_all)
instead(
    "among many, who is not seen is not there", "Sources.has_other", scenario="mute among many"
)(_sees_all)


@fault("a mute source is never left for a far one", "FAR_SILENCE_S", scenario="mute for long")
def _(silence_s):
    return math.inf


answers(
    "an update gives up before all ranks have come",
    "Search.all_go_on",
    value=True,
    scenario="missing",
)
answers(
    "what ends a call between two parts is told to nobody", "end_for_all", scenario="leaves a loop"
)
fault(
    "a part that is refused too late ends the next call like it",
    "_is_of_caller",
    scenario="refused argument",
)(lambda rule: lambda call, own: call.caller == own.caller)
answers(
    "an argument that one rank refuses is one of another call",
    "_is_with_other_arguments",
    value=False,
    scenario="refused argument",
)
fault(
    "a peer's deadline is taken for that of a look", "reaching:_answer", scenario="gives up first"
)(lambda answer: lambda rule, view: rule(view))
answers("who left a call out is taken for late", "is_left_out", value=False, scenario="left out")
fault(
    "calls are forgotten to which a rank has not come",
    "Call.was_made_by_all",
    scenario="far behind",
)(lambda rule: True)


@instead("a source is claimed with the decision", "announce_filling", scenario="burst across")
def _(rule, view, seat, call, spec, *, is_relay):
    step = rule(view, seat, call, spec, is_relay=is_relay)
    if not isinstance(step, Act):
        return step
    ref = versions.resolve(view, seat.keys, spec).ref
    holdings = sources.seen_holdings(view, seat, ref)
    inst = next(i for i, (held, _) in holdings.items() if held.state == "full")
    place = keys_module.place(holdings[inst][0].datacenter, inst)
    decided = msgspec.structs.replace(call, ref=ref).with_sources(place)
    guards, claimed = sources.claim_of(view, seat, decided, place, is_free=False)
    ops = (*step.txn.ops[1:], claimed)
    return seat_module.recorded(view, seat, decided, guards, ops)


@instead("idle sources are claimed beside others who look", "_idle", scenario="burst")
def _(rule, view, seat, ref, eligible, most):
    alone = {seat.inst: sources.seen_holdings(view, seat, ref)[seat.inst]}
    with changed("seen_holdings", lambda _: lambda *_: alone):
        return rule(view, seat, ref, eligible, most)


fault(
    "idle sources are claimed though others have come to look", "claim", scenario="alone no more"
)(edited(guards=without(NoneNewer)))


answers("a failed call leaves its reader records", "calls:withdraw", value=Done(None))

# Bytes, and the word that says whether they count


@fault("the word is not asked for after the bytes have landed", "ReadPass._count_if_served")
def _(end):
    return lambda self, batches: end(self, unasked(batches))


def unasked(batches):
    return [dataclasses.replace(batch, needs={}) for batch in batches]


@fault(
    "of batches that end together only the ranks of the first are asked",
    "ReadPass._count_if_served",
    scenario="end together",
)
def _(end):
    return lambda self, batches: end(self, [*batches[:1], *unasked(batches[1:])])


@instead(
    "of several sources only the first is asked for its word",
    "ReadPass._count_if_served",
    scenario="second source",
)
def _(end, self, batches):
    end(self, unasked(batches) if batches[0].supply else batches)


@instead(
    "the word is asked for before staged bytes have landed",
    "ReadPass._count_if_served",
    scenario="staged landing",
)
def _(end, self, batches):
    for batch in batches:
        for rank in batch.needs:
            self._sources[batch.supply].ask(rank)
    end(self, unasked(batches))


fault(
    "what is staged is copied over what counts, unasked",
    "ReadPass._read_staged",
    scenario="copied over",
)(lambda read: lambda self, batch: read(self, dataclasses.replace(batch, is_repeated=False)))


answers(
    "what two publish under one number is not compared",
    "require_equal_to_elder",
    scenario="other bytes",
)


@fault("an older publisher is not asked again", "elder", scenario="older goes on")
def _(rule):
    found = []

    def faulty(view, seat, ref):
        step = found[0] if found else rule(view, seat, ref)
        found.extend([step] if isinstance(step, Done) else [])
        return step

    return faulty


@instead("a manifest that was read once is believed", "Peers.state", scenario="moved")
def _(shown, self, card, *others, **more):
    known = {agent: dict(read) for agent, read in self._manifests.items() if read}
    now = shown(self, card, *others, **more)
    if now.manifest is None or now.agent not in known:
        return now
    return dataclasses.replace(now, manifest=next(iter(known[now.agent].values())))


answers("the word does not name the call", "mark", value=1)


@fault("the word names the call, not the content", "mark", scenario="other version")
def _(mark):
    return lambda uid, call: call


answers("the word is not voided before tensors are written", "Mailbox.void")


answers("a relay is read beyond what it has", "Following.has", value=True)


fault("progress counts blocks, not the prefix", "feed:_position")(
    lambda position: lambda told: ALL_BLOCKS if told.all() else int(np.sum(told))
)


@instead("progress is told before it is certain", "ReadPass.landed", scenario="other version")
def _(landed, self, reads):
    ends = Counter(self._batch_of[read] for read in reads)
    for batch, count in ends.items():
        if self._left[batch] == count:
            done = self._progress.done.copy()
            self._progress.add(self._phase.blocks[batch.blocks], 0)
            self._progress.done[:] = done
    landed(self, reads)


@instead("what was read of another version is kept", "Replication.start", scenario="other version")
def _(start, self, ref):
    if self.ref is None:
        start(self, ref)
    self.ref = ref


fault("a reader does not look whether it has its seat", "feed:connect", scenario="replaced reader")(
    lambda connect: (
        lambda peers, cards, source, deadline: connect(
            peers, cards, dataclasses.replace(source, check=lambda: None), deadline
        )
    )
)
answers("reads of a lost source are not ended", "close_all", scenario="late landing")

answers(
    "a source that does not answer is waited for",
    "Sources.has_other",
    value=False,
    scenario="stands still",
)


# Unpublishing

fault(
    "unpublish: nobody reading is not guarded", "unpublish:unpublish", scenario="claimed meanwhile"
)(edited(guards=without(Empty)))


@instead("unpublish: readers are not looked at", "unpublish:unpublish", scenario="drain")
def _(rule, view, *args):
    readers = [key for key in view.entries if "/readers/" in key]
    return edited(guards=without(Empty))(rule)(unseen(view, *readers), *args)


fault(
    "unpublish: only readers of this incarnation count",
    "Keys.readers_of_any",
    scenario="earlier readers",
)(lambda name: lambda self, run, version, source: self.readers_of(run, version, source))


@instead("unpublish waits without a bound", "unpublish:unpublish", scenario="stuck reader")
def _(rule, *args, **kwargs):
    step = rule(*args, **kwargs)
    return step.wait if isinstance(step, WaitAtMost) else step


@instead(
    "a stream suspects who takes its tensors back", "LeasedSources.lose", scenario="gone in order"
)
def _(lose, self, places, reason, **_):
    return lose(self, places, reason)


@instead("near readers are not waited for", "unpublish:_let_go", scenario="comes last")
def _(rule, view, *args):
    found = unpublish.near_and_far

    def reading(*args):
        near, far = found(*args)
        return unpublish.Readers([], near + far) if far else unpublish.Readers(near, far)

    with changed("near_and_far", lambda _: reading):
        return rule(view, *args)


fault("a near reader may come unseen", "unpublish:_let_go", scenario="comes last")(
    edited(guards=without(NoneNewer))
)


fault("who reads does not know what lingers", "Source.insts", scenario="drains at the end")(
    lambda _: property(lambda self: (self.inst, self.inst))
)


# Membership

fault("a successor leaves its predecessor's holdings", "create_group")(
    edited(ops=spare("holdings"))
)
fault(
    "a successor does not guard the predecessor's decisions",
    "create_group",
    scenario="replaced meanwhile",
)(edited(guards=not_on("decisions")))
fault("expelling leaves the holdings", "expel", scenario="dies")(edited(ops=spare("holdings")))
fault("expelling does not guard the decisions", "expel", scenario="expelled meanwhile")(
    edited(guards=not_on("decisions"))
)
fault("closing leaves the holdings", "membership:leave", scenario="closed meanwhile")(
    edited(ops=spare("holdings"))
)
fault("a seat is taken unseen", "_sit_down")(
    edited(ops=lambda op: None if isinstance(op, Put) and "/seen/" in op.key else op)
)
fault("who left in good order is looked for", "membership:leave", scenario="closed meanwhile")(
    edited(ops=spare("seen"))
)
fault("closing does not guard the decisions", "membership:leave", scenario="closed meanwhile")(
    edited(guards=not_on("decisions"))
)


@instead(
    "closing ends the incarnation that it knew", "membership:leave", scenario="closed coming back"
)
def _(rule, view, seat, note_lease_id):
    step = rule(view, seat, note_lease_id)
    if isinstance(step, Done):
        return step
    known = membership.to_delete(view, seat.keys, seat.inst)
    return Act(Txn(step.txn.guards, (step.txn.ops[0], *known)), step.then)


answers(
    "whose open is interrupted tells nobody",
    "call_off",
    value=Done(None),
    scenario="struck in open",
)
answers(
    "a newcomer is told of an open before its own",
    "_is_called_off",
    value=False,
    scenario="struck in open, not shared",
)


@instead(
    "whose open is interrupted tells only those that wait",
    "call_off",
    scenario="struck at the end of open",
)
def _(rule, view, who, failure, note_lease_id):
    group = records.GroupRecord.at(view, who.group)
    is_over = group is not None and group.is_complete
    return Done(None) if is_over else rule(view, who, failure, note_lease_id)


@instead("nobody watches the neighbour", "watch_over", scenario="dies")
def _(rule, view, seat):
    step = rule(view, seat)
    return Wait("", (calls.one(seat.group),)) if step == Done(None) else step


def unfenced(own_group):
    def faulty(view, at):
        try:
            return own_group(view, at)
        except seat.SeatLost:
            if at.group in view.entries:
                return view.entries[at.group]
            raise

    return faulty


fault("a fenced incarnation does not notice", "own_group")(unfenced)


@instead("a group is complete before all have come", "join", scenario="struck in open")
def _(rule, view, who, nonce):
    step = rule(view, who, nonce)
    if isinstance(step, Wait) and "has ranks" in step.reason:
        group = records.GroupRecord.decode(view.entries[who.group].value, who.group)
        return Done(membership.seat_of(who, group, 1, {}))
    return step


@instead("a rank that lost its seat does not come back", "find_group", scenario="comes back")
def _(rule, view, who):
    if who.left_behind:
        raise membership.Fenced(who.replica, "it is over")
    return rule(view, who)


@fault("ranks that come back bring nothing", "adopted")
def _(adopted):
    return lambda shards: ([], None)


@instead(
    "ranks that come back: whoever holds something is believed",
    "adopted",
    scenario="who is believed",
)
def _(adopted, shards):
    calls, kept = adopted(shards)
    return calls, kept or next((s.kept for s in shards if s.kept is not None), None)


@fault(
    "ranks that come back: one that knows less is believed", "adopted", scenario="who is believed"
)
def _(adopted):
    return lambda shards: (adopted(shards)[0], shards[0].kept)


@instead(
    "ranks that come back: nobody need be in the call that brought it",
    "adopted",
    scenario="who is believed",
)
def _(adopted, shards):
    calls, _ = adopted(shards)
    last = max((call.number for call in calls), default=0)
    knowing = [s for s in shards if last in {call.number for call in s.ended}]
    return calls, (knowing or shards)[0].kept


@fault("ranks that come back: the calls that ended are forgotten", "adopted", scenario="took back")
def _(adopted):
    return lambda shards: ([], adopted(shards)[1])


@instead("what the owner took back is not noted", "Ledger.forget", scenario="took back")
def _(forget, self, counted=None):
    ended = list(self.ended)
    result = forget(self, counted)
    self.ended.clear()
    self.ended.extend(ended)
    return result


answers(
    "what a peer's owner took back is held where that unpublish failed",
    "Ledger.forget_with_peers",
    scenario="failed for one",
)


@instead("what the owner took back is still held", "Ledger.forget")
def _(forget, self, counted=None):
    held = self.held
    result = forget(self, counted)
    if result is not False:
        self.held = held
    return result


@instead(
    "a call that was not waited for uses no number",
    "Ledger.goes_on_without",
    scenario="half cut off",
)
def _(goes_on_without, self, call):
    made = self.calls_made
    is_done = goes_on_without(self, call)
    if is_done:
        self.calls_made, call.life = made, CallLife.NEW
    return is_done


@instead(
    "what was given up before a publication without etcd stays open",
    "Ledger.goes_on_without",
    scenario="given up before",
)
def _(goes_on_without, self, call):
    before, self.unfinished = self.unfinished, None
    is_done = goes_on_without(self, call)
    if not is_done:
        self.unfinished = before
    return is_done


answers(
    "an etcd that refuses is borne for as long as it renews the lease",
    "Patience.bears_s",
    value=math.inf,
    scenario="refused",
)


@fault(
    "a read that is answered ends what is known of refused writes",
    "Failures.end",
    scenario="refused",
)
def _(_):
    return lambda self, _: self._since_s.clear()


@fault("who did not wait for a call is waited for", "Seat.done_by", scenario="does not wait")
def _(done_by):
    return lambda self, call: {}


@fault(
    "what came to nothing is not unpublished by who knows",
    "Ledger.not_waited_for",
    scenario="came to nothing",
)
def _(not_waited_for):
    return None


answers(
    "what was not waited for is not brought along", "not_waited_for", scenario="came to nothing"
)


@instead(
    "what is published again without etcd has the number of before",
    "Ledger.number_unbegun",
    scenario="trains on",
)
def _(unbegun, self, kind, asked):
    same = (one.number for one in self.ended if (one.kind, one.asked) == (kind, asked))
    return next(same, unbegun(self, kind, asked))


@fault(
    "what one rank alone did not wait for is offered", "not_waited_for", scenario="who is believed"
)
def _(rule):
    return lambda shards: next((shard.ready for shard in shards if shard.ready), None)


# Coverage

answers("coverage is not asked", "require_whole", "is_whole", value=True, scenario="lacks a cell")
answers(
    "coverage is not asked of a part that was asked for",
    "is_whole",
    value=True,
    scenario="a part is read",
)
fault("answers name tensors, and no boxes", "sharding", scenario="lacks a cell")(
    lambda sharding: (
        lambda layout: dataclasses.replace(
            sharding(layout), digest=manifest.logical([layout]).digest
        )
    )
)
fault(
    "a rank takes what it has for all, if all have said something",
    "Manifests._layouts_of",
    scenario="lacks a cell",
)(lambda _: lambda self, tensors, said, deadline: [_of_all(tensors.layout)])


def _of_all(layout):
    """The same tensors, each in one chunk."""
    return manifest.Layout(
        layout.tensors,
        tuple(
            manifest.ChunkRecord(n, (0,) * len(t.shape), t.shape, (1,) * len(t.shape), spread=False)
            for n, t in enumerate(layout.tensors)
        ),
    )


@instead(
    "answers are kept before anybody has looked", "Manifests.together", scenario="lacks a cell"
)
def _(together, self, tensors, said, deadline, **options):
    try:
        return together(self, tensors, said, deadline, **options)
    except BaseException:  # it had noted already what it was about to prove
        layout = manifest.logical([tensors.layout]).digest
        answers = records.answers_of(said)
        self._group.ledger._ends[answers] = (records.Outcome(said=layout, answers=answers), "")
        raise


@instead("answers that lack something are a version's", "calls:complete", scenario="a part is read")
def _(rule, view, seat, call, end, *args, **kwargs):
    if call.kind == "replicate" and not end.said:
        key = seat.keys.version(call.ref.run, call.ref.version)
        layout = records.VersionRecord.decode(view.entries[key].value, key).layout
        end = msgspec.structs.replace(end, said=layout)
    return rule(view, seat, call, end, *args, **kwargs)


answers(
    "what was not waited for is offered, whatever the ranks know of it",
    "answers_of",
    value="",
    scenario="a part unseen",
)


@instead(
    "what is shown without etcd is taken for what was shown before",
    "Ledger.brought",
    scenario="a part unseen",
)
def _(brought, self, shard):
    told, changes = brought(self, shard)
    before = [said for _, said in self._ends.values()]
    return msgspec.structs.replace(told, answer=before[-1] if before else ""), changes


@fault("a copy is made of what may be a part", "Attempt.may_end_well", scenario="a part is copied")
def _(note):
    return lambda self, ref, value, layout: note(self, ref, value, layout or value)


@instead("an end is learned without a seat", "Ledger.learn", scenario="late answer")
def _(learn, self, call, outcome, seat, *value):
    standing, mine = self.standing, self.seat
    self.standing, self.seat = ledger.Standing(), seat
    try:
        learn(self, call, outcome, seat, *value)
    finally:
        self.standing, self.seat = standing, mine


# Ranks that are out of step


@instead("who skips a call leaves its word", "OwnWord.skip", scenario="unpublished alone")
def _(skip, self, learn):
    mailbox = self._mailbox

    def serve(*args):  # of another call
        del mailbox.void, mailbox.serve
        mailbox.serve(*args)

    mailbox.void, mailbox.serve = (lambda: None), serve
    learn()


@instead(
    "who skips a call that failed holds nothing any more", "OwnWord.skip", scenario="failed before"
)
def _(skip, self, learn):
    self.void()
    learn()


@instead("a call that was skipped uses no number", "GroupCall._enter", scenario="failed before")
def _(enter, self, call):
    try:
        enter(self, call)
    except call_module.Missed:
        self.life, self._ledger.calls_made = CallLife.PASSED, self.number - 1
        raise


@instead(
    "a rank that is struck while it skips a call refuses that one",
    "GroupCall._enter",
    scenario="struck while it skips",
)
def _(enter, self, call):
    first = self._ledger.first
    try:
        enter(self, call)
    except call_module.Missed:
        raise
    except BaseException:
        self._ledger.first = first
        raise


@instead("a missed unpublish is another call", "meet", scenario="unpublished alone")
def _(meet, call, *args, **options):
    met = meet(call, *args, **options)
    is_missed = call.kind == "unpublish" and met is not Meeting.SAME
    return Meeting.OTHER if is_missed else met


@fault(
    "a call of dcp is given up while a rank has not begun it",
    "Group.have_all_begun",
    scenario="begins late",
)
def _(have_all_begun):
    return lambda self, number, asked: have_all_begun(self, number, asked) or True


answers(
    "a call of dcp that never comes is waited for",
    "Beginnings._end_if_late",
    scenario="never comes",
)


# Reads that are served later


answers("serve without proof", "first_changed", "first_difference", scenario="serves")


fault(
    "digests are believed that may be of the next content",
    "_certified",
    scenario="digests of the next",
)(lambda _: lambda peers, state, *_: state)


answers("serve: the ranks' digests are not added up", "first_difference", scenario="serves")


@instead("serve: only the number is compared", "serving:serve", scenario="served anew")
def _(rule, view, seat, call, ref):
    held = seat_module.holding_put(view, seat, ref, calls.filling(seat, call, ref))
    guards = (view.unchanged(seat.keys.version(ref.run, ref.version)),)
    decided = msgspec.structs.replace(call, ref=ref)
    return seat_module.recorded(view, seat, decided, guards, (held,))


fault("serve: the version's record is not guarded", "serving:serve", scenario="served anew")(
    edited(guards=not_on("versions"))
)


fault(
    "serve: a publication is not told that the number is held",
    "serving:serve",
    scenario="served meanwhile",
)(edited(ops=lambda op: None if isinstance(op, Put) and "/versions/" in op.key else op))


# Streams


fault("stream: handed out before the word", "Following.ask", scenario="streamed beside a write")(
    lambda ask: (
        lambda self, rank: None if type(self._progress) is feed.Arrivals else ask(self, rank)
    )
)

fault("stream: the record is kept while the consumer sleeps", "IDLE_S", scenario="streamed anew")(
    lambda idle_s: 1000.0
)


answers(
    "stream: a buffer is filled while it is used",
    "Filling._await_room",
    scenario="streamed anew",
)


answers(
    "stream: reads of a lost source are not ended", "close_all", scenario="streamed from another"
)


@fault(
    "stream: a number stands for its content",
    "full_ones",
    "sources:offered",
    scenario="streamed anew",
)
def _(rule):
    @functools.wraps(rule)
    def faulty(view, seat, ref, *args, **options):
        within = seat.keys.holdings_of(ref.run, ref.version)
        uids = [records.Holding.decode(e.value, key).uid for key, e in view.seen(within)]
        uid = uids[-1] if uids else ref.uid
        return rule(view, seat, msgspec.structs.replace(ref, uid=uid), *args, **options)

    return faulty


@instead(
    "stream: a record that was put without an answer is taken for a source",
    "rules:attach",
    scenario="streamed after a lost reply",
)
def _(attach, view, seat, ref, place, reader):
    key, source = seat.keys.holding_at(ref.run, ref.version, place), keys_module.inst_at(place)
    there, entry = view.get(reader.key), view.get(key)
    if entry is None or there is None or there.lease_id != reader.lease_id:
        return attach(view, seat, ref, place, reader)
    shards = dict(view.within(seat.keys.shards(source)))
    holding = records.Holding.decode(entry.value, key)
    offer = sources.Offered(key, source, holding, entry.create_rev)
    return Done(sources.source_from(offer, shards))


@instead("stream: its record stays", "LeasedSources.end", scenario="dropped stream")
def _(end, self):
    self.attached.clear()
    self._session = None


@instead(
    "stream: its record hangs on the lease of its rank",
    "LeasedSources._lease",
    scenario="dropped stream",
)
def _(lease, self):
    group = self.seating

    class Rank:
        lease_id = group.seat.lease_id
        is_valid = group.session.is_valid

        def close(self):
            pass

    return Rank()


# Calls without etcd


@fault(
    "a call without etcd is a part of the one in which it is ended",
    "GroupCall.own_call",
    scenario="given up before",
)
def _(own_call):
    return property(lambda self: self._ledger.part(own_call.fget(self)))


@instead(
    "a collector clears a version that is served meanwhile",
    "_old_versions",
    scenario="cleared meanwhile",
)
def _(old_versions, view, keys, held):
    for each in old_versions(view, keys, held):
        guards = tuple(filter(without(Empty), each.guards))
        yield dataclasses.replace(each, guards=guards)


@contextmanager
def planted(what: str):
    with FAULTS[what].plant():
        yield


collect("scenes")
collect("faults")

__all__ = ["FAULTS", "planted"]
