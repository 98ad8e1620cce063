"""Follow the trainer in one process, through the handle."""

import os

import torch
from model import build, continue_prompt
from scaffold import Scaffold

import torch_ros


def wait_for_newer(handle: torch_ros.ShardHandle, held: int) -> None:
    handle.wait(lambda available: max(available, default=0) > held)


def wait_for_the_end(handle: torch_ros.ShardHandle, held: int, trainer: str) -> None:
    """The trainer waits until it sees that we hold its last version: leave after it."""
    handle.wait(lambda available: trainer not in available.get(held, ()))


def main() -> None:
    scaffold = Scaffold("single rollout")
    scaffold.say("builds the model")
    model = build(seed=2)  # not the trainer's weights
    with torch_ros.open(os.environ["TORCH_ROS_MODEL"]) as handle:
        # dcp joins the keys of nested dicts with dots, and the trainer saves {"model": ...}.
        handle.register(torch.nn.ModuleDict({"model": model}))

        scaffold.say("waits for the first version")
        held = 0
        while held < scaffold.steps:
            wait_for_newer(handle, held)
            if not handle.update("latest"):
                continue
            is_first, held = held == 0, handle.version

            scaffold.check_digests(held, model.state_dict())
            scaffold.report_read(handle.replica, handle.last_read)
            if is_first or held == scaffold.steps:
                scaffold.say(f"version {held} says {continue_prompt(model)!r}")
        wait_for_the_end(handle, held, scaffold.trainer)


if __name__ == "__main__":
    main()
