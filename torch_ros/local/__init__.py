"""An etcd of this user's on this host. Knows nothing of what stands in it."""
