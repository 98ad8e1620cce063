"""Faults to plant in what tells which versions engines use."""

import dataclasses

import msgspec
from faults import fault, instead

from torch_ros.deadline import Deadline
from torch_ros.errors import TorchRosError
from torch_ros.features.installs.records import Install
from torch_ros.features.installs.rules import own_key
from torch_ros.store.loops import Done

fault("a replica that has vanished is gone", "installs:TTLS", scenario="wiped while waited")(
    lambda ttls: 0
)


fault(
    "the number that was entered is active", "Installing._content", scenario="published in a block"
)(lambda content: lambda self: self._ref)


fault("who waits for answers looks once a second", "FOLLOW_S", scenario="heard at once")(
    lambda follow_s: 1.0
)


@instead("who enters is active still", "Install.entered")
def _(entered, self, ref, attempt):
    return msgspec.structs.replace(entered(self, ref, attempt), active=self.active)


@instead("a rejection is told if the store takes it now", "Installs.tell", scenario="told later")
def _(tell, self, rule):
    soon = Deadline("telling", 1.0)
    try:
        return self.write(rule, soon)
    except TorchRosError:
        return None


@instead("who left badly is not believed if all seemed well", "reject", scenario="left badly")
def _(rule, view, seat, attempt, rejection):
    there = Install.at(view, own_key(seat))
    if there is not None and there.active is not None:
        return Done(there)
    return rule(view, seat, attempt, rejection)


@instead("who comes back takes any run that lives", "_live_runs", scenario="trained anew")
def _(live_runs, view, who):
    return live_runs(view, dataclasses.replace(who, run=who.run or ""))
