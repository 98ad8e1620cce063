"""`python -m torch_ros.store.local start|status|stop`: the etcd of this user on this host."""

import sys

from torch_ros.local.etcd import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
