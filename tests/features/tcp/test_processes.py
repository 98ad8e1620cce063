"""Processes that publish and load over sockets of ours, through etcd, without NIXL."""


def test_ranks_of_another_sharding_load_encrypted(jobs):
    jobs.environment |= {
        "TORCH_ROS_TRANSPORT": "tcp",
        "TORCH_ROS_LISTEN": "127.0.0.1",
        "UCX_TLS": "tcp",  # nothing is copied
    }
    jobs.run_ranks(2, "reshard_elsewhere")
