"""Faults to plant in what keeps versions from being lost."""

import dataclasses
import functools

from faults import answers, edited, fault, instead, not_on, without_moment
from planting import changed

from torch_ros.protocol.life import CallLife
from torch_ros.protocol.unpublish import Readers
from torch_ros.store import txn
from torch_ros.store.loops import Wait
from torch_ros.store.txn import Put

fault("a copy forgets when its version was published", "show_copy")(edited(ops=without_moment))


fault("the last copy is not kept", "keeping")(
    lambda keeping: lambda *args: dataclasses.replace(keeping(*args), is_needed=False)
)


fault("what a copy may go for is not guarded", "keeping", scenario="retained meanwhile")(
    lambda keeping: lambda *args: dataclasses.replace(keeping(*args), guards=())
)


fault("a witness may be draining", "retention:_counts", scenario="both drain")(
    lambda counts: lambda held: counts(held) or (held.state == "draining" and not held.spot)
)


fault("a witness may be filling", "retention:_counts")(
    lambda counts: lambda held: counts(held) or (held.state == "filling" and not held.spot)
)


fault("a spot replica is a witness", "retention:_counts", scenario="only on spot")(
    lambda counts: lambda held: held.state == "full"
)


fault("a witness elsewhere is one here", "retained_here", scenario="asked meanwhile")(
    lambda _: lambda *_: iter(())
)


fault(
    "the newest version anywhere is the newest here", "_held_versions", scenario="asked meanwhile"
)(lambda held: lambda view, keys, _: held(view, keys, None))


fault(
    "what another datacenter retains is retained here", "Keys.retains", scenario="kept elsewhere"
)(lambda _: lambda keys, _: txn.under(f"{keys.root}/retains/"))


@instead(
    "who begins to retain a version here is not heard of", "keeping", scenario="asked meanwhile"
)
def _(keeping, *args):
    keep = keeping(*args)
    guards = tuple(guard for guard in keep.guards if "/retains/" not in str(guard))
    return dataclasses.replace(keep, guards=guards)


@fault("the own copy is the witness", "keeping")
def _(keeping):
    nobody = functools.partial(dataclasses.replace, inst="nobody")
    return lambda view, keys, ref, dropped: keeping(view, keys, ref, nobody(dropped))


@instead("a copy is offered before all ranks have theirs", "show_copy")
def _(rule, view, seat, **kwargs):
    step = rule(view, seat, **kwargs)
    if isinstance(step, Wait):
        return rule(view, dataclasses.replace(seat, world_size=1), **kwargs)
    return step


fault(
    "a copy is offered behind the back of who ends its group",
    "show_copy",
    scenario="copied meanwhile",
)(edited(ops=lambda op: None if isinstance(op, Put) and "/decisions/" in op.key else op))


fault("a copy is never released", "release")(
    lambda rule: lambda view, seat, ref, copy: Wait("", seat.own)
)


@instead("release drains the copy under far readers", "near_and_far", scenario="taken back")
def _(reading, view, readers):
    found = reading(view, readers)
    return Readers(found.near + found.far, []) if "+" in readers.start else found


answers(
    "who looks for a source is forgotten", "_is_filled_afar", value=False, scenario="last of two"
)


@instead("who has not come to a copy is forgotten", "release", scenario="slow to come")
def _(rule, view, seat, ref, copy):
    of_copy = lambda keys, run, version, _: keys.readers_of(run, version, copy)
    with changed("Keys.readers_of_any", lambda _: of_copy):
        return rule(view, seat, ref, copy)


answers("far readers are left with nobody", "_copy_first", scenario="taken back")


answers("a second copy for far readers", "_has_copy", value=False, scenario="second copy")


fault(
    "a far reader is left because of somebody who leaves too",
    "unpublish:_let_go",
    scenario="last of two",
)(edited(guards=not_on("holdings")))


fault("a copy is made for all who read from afar", "keeping", scenario="last of two")(
    lambda keeping: lambda *args: dataclasses.replace(keeping(*args), is_elsewhere=False)
)


for optional in ("no memory", "no memory for a copy"):
    is_needed = "" if optional == "no memory" else " that is needed"

    @fault(
        f"without memory for a copy{is_needed} an unpublish fails", "do_without", scenario=optional
    )
    def _(_):
        def faulty(*_, **__):
            raise MemoryError

        return faulty

    @instead(
        f"a peer's want of memory for a copy{is_needed} is not heard of",
        "show_copy",
        scenario=optional,
    )
    def _(rule, view, seat, **kwargs):
        with changed("seat:find", lambda _: lambda *_: None):
            return rule(view, seat, **kwargs)


fault("a copy that is forgone is tried again", "_may_lose", scenario=optional)(
    lambda _: lambda seat, _: seat.spot
)


answers("no copy is made of what is retained", "_may_lose", value=True, scenario="only on spot")


@instead("what is suspected retires older ones", "_held_versions", scenario="suspected newer")
def _(holders, *args):
    with changed("suspects", lambda _: lambda *_: set()):
        return holders(*args)


fault("what may go is gone", "_held_versions", scenario="suspected before")(
    lambda holders: lambda *args: (holders(*args)[0], set())
)


answers("what lingers is a witness", "lingers", value=False, scenario="no witness")


answers("the only copy is given up while etcd is away", "must_copy", scenario="retained meanwhile")


@instead("a copy at each unpublish while etcd is away", "must_copy", scenario="retained meanwhile")
def _(must_copy, ledger, *args):
    if ledger.unfinished is not None:
        is_unwaited = ledger.unfinished.life is CallLife.UNWAITED
        ledger.unfinished.life = CallLife.READY_UNWAITED if is_unwaited else CallLife.READY
    return must_copy(ledger, *args)
