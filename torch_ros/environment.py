"""Every environment variable of this package, and the option that it stands for.

`local` alone keeps its own, `TORCH_ROS_LOCAL_DIR`: its supervisor runs as a file by itself.
"""

import os

ENDPOINT = "TORCH_ROS_ENDPOINT"  # `open(endpoint=...)`
BUCKET = "TORCH_ROS_BUCKET"  # `open(bucket=...)`
MODEL = "TORCH_ROS_MODEL"  # of `dcp.save` and `dcp.load` without a handle
REPLICA = "TORCH_ROS_REPLICA"  # of the same, with "-save" or "-load" behind it
TRANSPORT = "TORCH_ROS_TRANSPORT"  # `open(transport=...)`
LISTEN = "TORCH_ROS_LISTEN"  # `open(listen=...)`
DEFAULT_MODEL = "default"  # of a process that names none
CHECK_CONTRACT = "TORCH_ROS_CHECK_CONTRACT"  # "1": `open(check_contract=True)`
PROGRESS = "TORCH_ROS_PROGRESS"  # "0": no progress bars
HUGE_PAGES = "TORCH_ROS_HUGE_PAGES"  # "0": `open(huge_pages=False)`
METRICS_PORT = "TORCH_ROS_METRICS_PORT"  # `torch_ros.metrics.serve`, when a handle is opened
INIT_METHOD = "TORCH_ROS_INIT_METHOD"  # the URL behind `init_method="etcd://"`
READY_DIR = "TORCH_ROS_READY_DIR"  # where engines say what they use; by default /tmp
WEB_TOKEN = "TORCH_ROS_WEB_TOKEN"  # noqa: S105  # `torch-ros web --token`

# Files and names, never secrets: an endpoint ends up in logs and process lists.
ETCD_CA = "TORCH_ROS_ETCD_CA"
ETCD_CERT = "TORCH_ROS_ETCD_CERT"
ETCD_KEY = "TORCH_ROS_ETCD_KEY"
ETCD_USER = "TORCH_ROS_ETCD_USER"
ETCD_PASSWORD_FILE = "TORCH_ROS_ETCD_PASSWORD_FILE"  # noqa: S105  # the name of a file's name


def value(variable: str) -> str:
    """The variable's present value; "" if it is not set."""
    return os.environ.get(variable, "")
