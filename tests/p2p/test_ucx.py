"""Which options UCX gets, on hosts with a GPU and without; UCX takes both."""

import pytest

from torch_ros.p2p import ucx
from torch_ros.p2p.nixl import NixlTransport


@pytest.mark.parametrize("has_gpu", [False, True])
def test_ucx_takes_the_options_of_a_host_with_a_gpu_and_of_one_without(
    monkeypatch, tmp_path, has_gpu
):
    driver = tmp_path / "nvidia"
    if has_gpu:
        driver.mkdir()
    monkeypatch.setattr(ucx, "_GPU_DRIVER", driver)
    assert ("CUDA_IPC_ENABLE_GET_ZCOPY=y" in ucx.ucx_config()) is has_gpu
    transport = NixlTransport()
    assert transport.connection
    transport.close()
