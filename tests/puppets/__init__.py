"""The processes that tests start: a kit that knows how they are started, heard, struck and ended.

It knows nothing about torch_ros; the programs that it starts do.
"""

from puppets.actors import Actor
from puppets.jobs import PROGRAMS, Jobs
from puppets.puppet import Puppet, Puppets, share_warm_parent
from puppets.servers import EtcdCluster, EtcdServer, etcd_programs, free_port, running_etcd

__all__ = [
    "PROGRAMS",
    "Actor",
    "EtcdCluster",
    "EtcdServer",
    "Jobs",
    "Puppet",
    "Puppets",
    "etcd_programs",
    "free_port",
    "running_etcd",
    "share_warm_parent",
]
