"""A rollout that goes to even versions only, by a policy of its own:

    python examples/even_versions.py

Its trainer goes on as ever, and other rollouts may follow every version.
"""

from collections.abc import Sequence

import torch

import torch_ros


class Even:
    """Chooses the newest even version."""

    def choose(self, available: Sequence[int], _held: int | None) -> int | None:
        return next((version for version in available if version % 2 == 0), None)


def main() -> None:
    weights, mine = torch.zeros(4), torch.zeros(4)
    trainer = torch_ros.open("even", endpoint="memory://even", replica="trainer")
    rollout = torch_ros.open("even", endpoint="memory://even", replica="rollout", policy=Even())
    with trainer, rollout:
        trainer.register({"w": weights})
        rollout.register({"w": mine})
        for version in range(1, 7):
            trainer.unpublish()
            weights.fill_(version)
            trainer.publish(version)
            is_new = rollout.update()
            print(f"version {version}: {'new' if is_new else 'passed by'}, {mine.tolist()}")


if __name__ == "__main__":
    main()
