"""Which options UCX gets from us. An environment variable (UCX_TCP_ and so on) still wins."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

# UCX's default of 8 KiB moves 0.8 GB/s over loopback, this 2.2. And by default a thread that waits
# for UCX spins: the progress thread, once awake, would take a core for as long as a read within the
# host is copied.
_ANYWHERE = "TCP_TX_SEG_SIZE=1m,TCP_RX_SEG_SIZE=1m,USE_MT_MUTEX=y"

# UCX reads another process's GPU memory over CUDA IPC only where it sees NVLink, although within
# one GPU none is needed, and between GPU and host not at all: both went over TCP, at 3 GB/s. With
# these: docs/benchmarks/NOTES.md, "On a GPU".
_WITH_GPU = "CUDA_IPC_ENABLE_GET_ZCOPY=y,RMA_PPLN_ENABLE=y"
_GPU_DRIVER = Path("/proc/driver/nvidia")


# Ways that read another process's memory by the number that its address names.
BY_NUMBER = frozenset({"cma", "knem", "xpmem"})

_given: list[str] = []  # while `closing` hides it
_SHARED_MEMORY = {"mm", "sm", "shm"}  # names for several ways, some of them by number


def has_gpu() -> bool:
    """Whether NVIDIA's driver is here. Asking torch begins CUDA, which a fork does not survive."""
    return _GPU_DRIVER.exists()


def ucx_config() -> str:
    return f"{_ANYWHERE},{_WITH_GPU}" if has_gpu() else _ANYWHERE


def options(
    interfaces: Sequence[str], *, is_closed: bool, has_rdma: bool
) -> list[tuple[dict[str, str], frozenset[str]]]:
    """Options for NIXL's backend, and beside each the ways that UCX does without; the first that
    works counts. All that UCX has, or TCP alone over these interfaces; or, if it is closed, what
    opens no port to other hosts: RDMA, else TCP over loopback, by which it learns of ends.
    """
    engine = {"engine_config": ucx_config()}
    by_rdma, on_loopback = (engine, BY_NUMBER | {"tcp"}), (engine | _devices("lo"), BY_NUMBER)
    if is_closed and has_rdma:  # without a GPU nothing but RDMA is worth an agent
        return [by_rdma, on_loopback] if has_gpu() else [by_rdma]
    if is_closed:
        return [on_loopback]
    if interfaces:  # not TLS=tcp: without cuda_copy, UCX takes a GPU's memory for the host's
        engine = {"engine_config": f"{ucx_config()},SHM_DEVICES=none", **_devices(*interfaces)}
    return [(engine, frozenset())]


def lacking(options: Mapping[str, str], closed: Collection[str], error: Exception) -> str:
    """Text for an error: what NIXL's backend cannot use, and what to look at."""
    found = options.get("device_list", "RDMA" if closed else "any device")
    way_out = "is it up? Do UCX_TLS and UCX_NET_DEVICES, if they are set, have it?"
    return f"UCX cannot use {found}: {error}; {way_out}"


def _devices(*names: str) -> dict[str, str]:
    # NIXL adds a port of RDMA's to the last device, which then is none of TCP's.
    return {"device_list": ",".join((*names, names[-1]))}


def allowed(given: str, closed: Collection[str]) -> str:
    """The value of UCX_TLS that allows what the `given` one does, and none of the `closed` ways."""
    names = [name for name in given.removeprefix("^").split(",") if name]
    if given.startswith("^") or not names or "all" in names:
        return "^" + ",".join(sorted({*names, *closed} - {"all"}))
    kept = [name for name in names if name not in {*closed, *_SHARED_MEMORY}]
    return ",".join([*kept, "posix", "sysv"] if _SHARED_MEMORY & set(names) else kept)


@contextmanager
def closing(ways: Collection[str]) -> Iterator[None]:
    """Have UCX do without these ways in a backend that is made meanwhile. It reads them from the
    environment alone: NIXL splits what it is given at commas. So a child that is started in these
    milliseconds has them closed, too.
    """
    if not ways:
        yield
        return
    given = os.environ.get("UCX_TLS")
    _given.append(given or "")
    os.environ["UCX_TLS"] = allowed(given or "", ways)
    try:
        yield
    finally:
        os.environ.pop("UCX_TLS")
        if given is not None:
            os.environ["UCX_TLS"] = given
        _given.pop()


def told() -> str:
    """The value of UCX_TLS that the user has set, also while a backend is made without it."""
    return [os.environ.get("UCX_TLS", ""), *_given][-1]
