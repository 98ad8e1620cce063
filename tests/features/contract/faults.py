"""Faults to plant in what withdraws a version."""

from faults import answers

from torch_ros.store.loops import Done

answers(
    "a version that its publisher wrote to stays what it is",
    "contract:withdraw",
    value=Done(None),
    scenario="withdrawn",
)
