"""A real job: two ranks with FSDP2 save, rollouts load, over etcd and NIXL. More: processes."""


def test_fsdp2_to_tensor_parallel_to_one_process_and_back(jobs):
    jobs.run_ranks(2, "reshard")
