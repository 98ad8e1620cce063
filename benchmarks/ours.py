"""Those who move weights with torch_ros: actors for the processes of the benchmarks."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensors as contents
from harness import Setup, seconds

import torch_ros

SETTLE_S = 60.0
ALONE = {"rank": 0, "world_size": 1}  # whatever process group the process is in


def opened(
    setup: Setup, model: str, name: str, tensors: contents.Tensors, **options: Any
) -> torch_ros.ShardHandle:
    handle = torch_ros.open(
        f"{setup.name}-{model}", endpoint=setup.endpoint, replica=name, **options
    )
    handle.register(tensors)
    return handle


def settle(handle: torch_ros.ShardHandle) -> torch_ros.HugePageReport:
    """Wait until the registered tensors are on as many huge pages as they will be."""
    deadline_s = time.monotonic() + SETTLE_S
    while (report := handle.huge_pages).bytes_waiting:
        assert time.monotonic() < deadline_s, report
        time.sleep(0.1)
    return report


class Trainer:
    def __init__(self, setup: Setup, model: str, tensors: contents.Tensors, **options: Any) -> None:
        self.tensors = tensors
        self._handle = opened(setup, model, "trainer", tensors, **options)
        self._version = 0

    def settle(self) -> torch_ros.HugePageReport:
        return settle(self._handle)

    def size_bytes(self) -> int:
        return contents.size_bytes(self.tensors)

    def write(self) -> int:
        """The content of a new version, which nobody offers yet; says its number."""
        self._handle.unpublish()
        self._version += 1
        contents.write(self.tensors, self._version)
        return self._version

    def publish(self) -> float:
        """Offer what was written; the seconds that takes."""
        return seconds(lambda: self._handle.publish(self._version))

    def unpublish(self) -> float:
        return seconds(self._handle.unpublish)

    def cycle(self, count: int) -> list[tuple[float, float]]:
        """Seconds of each of `count` publishes and unpublishes that nobody reads."""
        self._handle.unpublish()
        taken_s = []
        for _ in range(count + 1):
            self._version += 1
            taken_s.append((self.publish(), self.unpublish()))
        return taken_s[1:]  # the first ones come after something else

    def close(self) -> None:
        self._handle.close()


class Rollout:
    def __init__(
        self, setup: Setup, model: str, name: str, tensors: contents.Tensors, **options: Any
    ) -> None:
        self.tensors = tensors
        self._handle = opened(setup, model, name, tensors, **options)

    def settle(self) -> torch_ros.HugePageReport:
        return settle(self._handle)

    def replicate(self, version: int) -> dict[str, Any]:
        return self._read(lambda: self._handle.replicate(version))

    def update(self) -> dict[str, Any]:
        return self._read(lambda: self._handle.update("latest"))

    def _read(self, call: Callable[[], object]) -> dict[str, Any]:
        elapsed_s = seconds(call)
        report = self._handle.last_read
        assert report is not None
        return {
            "elapsed_s": elapsed_s,
            "read_s": report.stages_s["read"],
            "bytes_read": report.bytes_read,
            "source": report.source,
            "reroutes": report.reroutes,
        }

    def look(self, count: int) -> list[float]:
        """Seconds of each of `count` updates that find nothing newer."""
        return [seconds(lambda: self._handle.update("latest")) for _ in range(count)]

    def verify(self, version: int) -> None:
        contents.verify(self.tensors, version)

    def let_go(self) -> None:
        """From here on others may write to the tensors."""
        self._handle.unpublish()

    def close(self) -> None:
        self._handle.close()


def status_bytes(name: str, where: str = "status") -> int:
    """Look up an entry about this process's memory in that file of /proc/self."""
    found = re.search(
        rf"^{name}:\s*(\d+) kB", Path(f"/proc/self/{where}").read_text(), re.MULTILINE
    )
    assert found is not None, f"/proc/self/{where} has no {name}"
    return int(found[1]) << 10


class Process:
    """What this process takes of the machine."""

    def cpu_s(self) -> float:
        return time.process_time()  # of all threads

    def close(self) -> None:
        pass
