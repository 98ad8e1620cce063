"""Faults to plant in updates that wait, in loops over versions, and in policies."""

from faults import answers, fault, instead

from torch_ros.features.following.flow import STOPPED
from torch_ros.protocol.policy import Next, Policy
from torch_ros.store.loops import Done


@instead(
    "who is told to stop leaves before its peers know",
    "LookingOut.run",
    scenario="told to stop, and closes",
)
def _(run, self):
    found = run(self)
    return Next() if found.said == STOPPED else found


fault("what a policy has chosen is the least that is read", "Chosen.to_read", scenario="chosen")(
    lambda _: Policy.to_read
)
fault("who holds nothing does not ask its policy", "Chosen.is_asked_first", scenario="chosen")(
    lambda _: False
)


fault("who waits does not hear of its peers", "_with_own", scenario="waits for versions")(
    lambda rule: lambda wait, seat: wait
)
answers(
    "who comes second is not asked to stop",
    "Search.all_go_on",
    value=True,
    scenario="slow rank told to stop",
)


answers("who leaves a loop alone tells nobody", "following:leave", scenario="leaves a loop")


@instead(
    "peers that begin another loop are taken for those that go on",
    "gone_on",
    scenario="follows again",
)
def _(rule, view, seat, number, asked):
    step = rule(view, seat, number, asked)
    return Done(value=True) if isinstance(step, Done) else step


@instead("a rank that is told to stop leaves by itself", "newer_versions", scenario="told to stop")
def _(made, shard, request, stop):
    versions = made(shard, request, lambda: False)
    while not stop():
        yield next(versions)
