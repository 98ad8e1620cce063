"""Faults to plant in what fetches versions ahead, and in what passes them by."""

import dataclasses
import math

from faults import answers, edited, fault, instead, without

from torch_ros.features.seeding import forerunner
from torch_ros.protocol import versions
from torch_ros.store.loops import Done, Wait
from torch_ros.store.txn import NoneNewer, one

answers(
    "forerunners do not look at each other", "_is_fetching", value=False, scenario="ordered twice"
)


fault("forerunners may overtake each other", "fetch", scenario="ordered twice")(
    edited(without(NoneNewer))
)


fault("a forerunner's copy is never spare", "await_spare", scenario="ordered twice")(
    lambda rule: lambda view, seat, ref: Wait("", (one(seat.group),))
)


answers(
    "a forerunner's copy is spare at once",
    "await_spare",
    value=Done(None),
    scenario="often asked",
)


fault("a stuck seed is waited for", "STUCK_S", scenario="seed ahead is stuck")(
    lambda limit_s: math.inf
)


answers("no rank's memory is asked for", "Forerunner._require_room", scenario="no memory ahead")


fault("a rank without memory keeps it to itself", "GroupTask", scenario="no memory ahead")(
    lambda made: (
        lambda kind, asked, deadline, perform, *rest: (
            made(kind, asked, deadline, lambda call: call.decide((), forerunner.recorded))
            if kind == "agree" and perform.__module__ == forerunner.__name__
            else made(kind, asked, deadline, perform, *rest)
        )
    )
)


@instead("an update waits for what it has ordered", "Forerunner.fetch", scenario="often asked")
def _(order, self, ref, deadline):
    order(self, ref, deadline)
    while not self.is_idle and not self._is_closed:
        forerunner.time.sleep(0.5)


@fault("what is coming is passed by for ever", "Skipping", scenario="passed by")
def _(made):
    return lambda may_fetch, has_waited: made(may_fetch, has_waited=False)


@fault("what is coming is gone to at once", "Skipping", scenario="passed by")
def _(made):
    return lambda may_fetch, has_waited: made(may_fetch, has_waited=True)


fault("who looks out does not ask its forerunner", "NearFirst.next_version", scenario="idle again")(
    lambda rule: lambda *args: dataclasses.replace(rule(*args), until=None)
)


@instead("what is coming is nothing", "_next_from_afar", scenario="passed by")
def _(rule, there, newest, skipping):
    return rule({}, newest, skipping)


@fault(
    "an update that skips goes to the newest all the same",
    "replication:replicate",
    scenario="passed by",
)
def _(read):
    return lambda shard, spec, *rest: read(shard, versions.Spec(floor=spec.only), *rest)


fault("a copy that is whole here wakes nobody", "near_range", scenario="waits for a neighbour")(
    lambda range_: lambda seat, ref: one("nothing")
)


@instead("what is here is passed by", "next_version", scenario="passed by")
def _(rule, view, seat, spec, held, skipping):
    found = rule(view, seat, spec, held, skipping)
    newest = versions.newer(view, seat.keys, spec, held) if found.ref else None
    return dataclasses.replace(found, ref=newest.ref if newest else None)
