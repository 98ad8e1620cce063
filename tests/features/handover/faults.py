"""Faults to plant in how a handle closes, and in what waits for a bucket."""

import dataclasses

import msgspec
from faults import edited, fault, instead, not_on, said, spare

from torch_ros.features.handover import archives, rules
from torch_ros.store.loops import Act, Wait
from torch_ros.store.txn import Put

fault("what is retained here is stayed for by all", "handover:_others", scenario="closes here")(
    lambda awaited: lambda view, keys, ref, inst, _: awaited(view, keys, ref, inst, None)
)


@instead(
    "what is retained here is stayed for by nobody", "handover:_keeping", scenario="closes here"
)
def _(keeping, *args):
    keep = keeping(*args)
    return dataclasses.replace(keep, is_needed=keep.is_needed and not keep.only_in)


fault("the name is not free while it lingers", "give_up", scenario="last version")(
    edited(ops=spare("groups"))
)


fault("nobody is stayed for", "handover:_others", scenario="lingers")(lambda _: lambda *_: [])


fault("a spot replica is stayed for", "handover:_others", scenario="archived elsewhere")(
    lambda awaited: (
        lambda view, *args: awaited(said(view, b'"spot":true', b'"spot":false', "/groups/"), *args)
    )
)


fault("of two that close, each may count on the other", "give_up", scenario="both close")(
    edited(guards=not_on("holdings"))
)


fault("a rank that died lingering is not missed", "linger", scenario="dies lingering")(
    lambda linger: lambda view, each, world_size: linger(view, each, 0)
)


@instead("what lingers drains without a word", "linger", scenario="drains at the end")
def _(linger, view, each, world_size):
    step = linger(view, each, world_size)
    is_put = isinstance(step, Act) and isinstance(step.txn.ops[0], Put)
    return Wait("", rules.linger_ranges(each)) if is_put else step


@instead("a rank that closes does not wait for its peers", "give_up", scenario="lingers")
def _(give_up, view, seat, leaving, **kwargs):
    step = give_up(view, seat, leaving, **kwargs)
    if isinstance(step, Wait):
        return give_up(view, dataclasses.replace(seat, world_size=1), leaving, **kwargs)
    return step


fault("who leaves lets nobody finish", "let_finish", scenario="leaves")(
    lambda let_finish: lambda *args, **options: let_finish(*args, **options | {"is_patient": False})
)


@instead("who leaves admits newcomers", "let_finish", scenario="leaves")
def _(let_finish, view, seat, leaving, **options):
    step = let_finish(view, seat, leaving, **options)
    if isinstance(step, Act):
        return Wait("", rules.let_finish_ranges(seat, leaving))
    return step


fault("close ignores archivers", "archives:behind", scenario="last version")(
    lambda _: lambda *_: []
)


fault("archivers are stayed for, and want nothing", "handover:_wanted", scenario="last version")(
    lambda _: lambda *_: ()
)


@instead("who lingers does not watch archivers", "linger", scenario="last version")
def _(linger, view, each, world_size):
    step = linger(view, each, world_size)
    if isinstance(step, Wait):
        ranges = tuple(r for r in step.ranges if r != each.keys.archives())
        return msgspec.structs.replace(step, ranges=ranges)
    return step


fault("archivers count by number", "_is_behind", scenario="last version anew")(
    lambda _: lambda said, ref: said.order < ref.order
)


fault("what an archiver says outlives it", "archives:say", scenario="last version")(
    edited(ops=lambda op: msgspec.structs.replace(op, lease_id=0))
)


@fault("unpublish looks at archivers", "keeping", "keeping_ranges", scenario="bucket is dead")
def _(rule):
    def ranges(keys, *args):
        return (*rule(keys, *args), keys.archives())

    def keeping(view, keys, ref, given_up):
        wanted = ("latest",) if archives.behind(view, keys, ref) else ()
        return rule(view, keys, ref, dataclasses.replace(given_up, retain=wanted))

    return ranges if rule.__name__ == "keeping_ranges" else keeping


fault(
    "an archiver that has something newer is stayed for", "_is_behind", scenario="archiver is ahead"
)(lambda _: lambda said, ref: said.uid != ref.uid)


@instead(
    "an archiver is stayed for with what is wanted here", "_awaited", scenario="archived elsewhere"
)
def _(awaited, view, each, inst, keep):
    return awaited(view, each, inst, dataclasses.replace(keep, only_in=None))


@instead("an archiver speaks once", "Archives._say", scenario="archiver comes back")
def _(say, self, ref, timeout_s):
    if self._said is None or self._said[1] != ref:
        say(self, ref, timeout_s)
