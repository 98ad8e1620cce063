"""The device that pieces of the agenda use, and the rows that they yield.

A CPU stands in for a GPU, call by call, so that every line of a piece runs without one.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from harness import seconds

BUSY_CYCLES = 50_000_000  # some 30 ms
TAKES = 3  # of each measurement; one before them warms up


@dataclass(frozen=True, slots=True)
class Row:
    """One finding of a piece."""

    what: str
    found: str
    ratio: float | None = None  # to torch's own
    aim: str = ""
    is_met: bool | None = None  # None: there is no aim, or a CPU cannot tell


class Card:
    """A CPU."""

    is_gpu = False

    def __init__(self, device: str, scale: float) -> None:
        self.device, self._scale = device, scale

    def size_bytes(self, gib: float) -> int:
        return max(1 << 20, int(gib * self._scale * 2**30))

    def tensors(self, size_bytes: int, count: int = 100) -> dict[str, torch.Tensor]:
        each = size_bytes // 2 // count
        return {
            f"t{number:03d}": torch.randn(each, device=self.device, dtype=torch.bfloat16)
            for number in range(count)
        }

    def matrices(self, size_bytes: int) -> dict[str, torch.Tensor]:
        """Matrices as large as those of models; at least two."""
        rows = 4096 if self.is_gpu else 256
        count = max(2, size_bytes // (2 * rows * rows))
        return {
            f"m{number:03d}.weight": torch.randn(
                rows, rows, device=self.device, dtype=torch.bfloat16
            )
            for number in range(count)
        }

    def seconds(self, call: Callable[[], object]) -> float:
        self.synchronize()

        def finished() -> None:
            call()
            self.synchronize()

        return seconds(finished)

    def usual(self, call: Callable[[], object], takes: int = TAKES) -> float:
        """The median of some takes, after one that warms up."""
        self.seconds(call)
        return median(self.seconds(call) for _ in range(takes))

    def name(self) -> str:
        return "CPU"

    def synchronize(self) -> None:
        pass

    def busy(self) -> None:
        """Keep the current stream from going on for a while."""

    def side(self) -> contextlib.AbstractContextManager[object]:
        """Within the block, another stream than before is the current one."""
        return contextlib.nullcontext()

    def give_back(self) -> None:
        """Have torch's allocator give segments back that it does not use."""

    def grows(self) -> bool:
        """Whether segments of torch's allocator can grow."""
        return False

    def used_bytes(self) -> int:
        """Bytes of the device that all processes use together."""
        return 0

    def peak_bytes(self) -> int:
        """The most that tensors of this process took since the last such call."""
        return 0

    @contextlib.contextmanager
    def short_of_memory(self, left_bytes: int) -> Iterator[None]:
        """Within the block, this process gets so much more memory, and no more."""
        del left_bytes
        yield

    def captured(
        self, call: Callable[[], object], meanwhile: Callable[[], object]
    ) -> Callable[[], object]:
        """Capture the call, in the mode that another thread's calls can end; what replays it."""
        call()
        meanwhile()
        return call

    def other_names(self) -> Mapping[str, str]:
        """An environment in which a process sees the same devices under another spelling."""
        return {"CUDA_VISIBLE_DEVICES": ""}


class Gpu(Card):
    """The first CUDA device. Nothing here is called before a piece has forked its children."""

    is_gpu = True

    def name(self) -> str:
        return torch.cuda.get_device_name()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def busy(self) -> None:
        torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001  # torch's own tests use it

    def side(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream())

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def grows(self) -> bool:
        segments = torch.cuda.memory_snapshot(include_traces=False)
        return any(segment.get("is_expandable") for segment in segments)

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def peak_bytes(self) -> int:
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return most

    @contextlib.contextmanager
    def short_of_memory(self, left_bytes: int) -> Iterator[None]:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        most = torch.cuda.memory_reserved() + left_bytes
        torch.cuda.set_per_process_memory_fraction(most / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def captured(
        self, call: Callable[[], object], meanwhile: Callable[[], object]
    ) -> Callable[[], object]:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            call()
            meanwhile()
        return graph.replay

    def other_names(self) -> Mapping[str, str]:
        return {"CUDA_VISIBLE_DEVICES": f"GPU-{torch.cuda.get_device_properties(0).uuid}"}


def card(device: str, scale: float) -> Card:
    return (Gpu if device == "cuda" else Card)(device, scale)


def speed(
    what: str, size_bytes: int, taken_s: float, own_s: float | None = None, aim: float | None = None
) -> Row:
    """So many bytes in a time, beside torch's own time for them."""
    ratio = own_s / taken_s if own_s is not None else None
    is_met = ratio >= aim if ratio is not None and aim is not None else None
    wanted = f">= {aim:g} of torch's" if aim is not None else ""
    return Row(what, f"{size_bytes / taken_s / 1e9:.2f} GB/s", ratio, wanted, is_met)


def outcome(what: str, found: object, aim: str, *, is_met: bool | None) -> Row:
    return Row(what, " ".join(str(found).split())[:300], None, aim, is_met)
