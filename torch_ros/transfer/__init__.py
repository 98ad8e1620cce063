"""Shows one process's tensors and reads those of others. Knows no etcd and no version."""
