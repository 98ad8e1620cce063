"""Which options UCX gets from us. An environment variable (UCX_TCP_ and so on) still wins."""

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


def has_gpu() -> bool:
    """Whether NVIDIA's driver is here. Asking torch begins CUDA, which a fork does not survive."""
    return _GPU_DRIVER.exists()


def ucx_config() -> str:
    return f"{_ANYWHERE},{_WITH_GPU}" if has_gpu() else _ANYWHERE
