"""Commands for people, `torch-ros ...`: they read etcd, and know neither tensors nor transports."""
