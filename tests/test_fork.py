"""Fork: who may open a handle in the child, and that it can be read from."""

SCRIPT = """
import os, sys
import torch, torch_ros
from torch_ros.errors import UsageError

endpoint, model = sys.argv[1:]

def forked(body):
    child = os.fork()
    if child == 0:
        body()
        os._exit(0)
    return child

def refused():
    try:
        torch_ros.open(model, endpoint=endpoint)
    except UsageError as error:
        assert "close the handle before the fork" in str(error), error
    else:
        os._exit(3)

def source():
    with torch_ros.open(model, endpoint=endpoint, replica="source") as handle:
        handle.register({"w": torch.arange(8.0)})
        handle.publish(1)
        os.read(end, 1)

def reader():
    with torch_ros.open(model, endpoint=endpoint, replica="reader") as handle:
        got = torch.zeros(8)
        handle.register({"w": got})
        handle.replicate(1, timeout_s=60)
        assert torch.equal(got, torch.arange(8.0))

parent = torch_ros.open(model + "-parent", endpoint=endpoint)
assert os.waitpid(forked(refused), 0)[1] == 0, "opened beside its parent's"
assert os.waitpid(forked(lambda: os.waitpid(forked(refused), 0)[1] and os._exit(4)), 0)[1] == 0
parent.list()
parent.close()
end, begin = os.pipe()
serving = forked(source)
assert os.waitpid(forked(reader), 0)[1] == 0, "a child could not read from another"
os.write(begin, b"x")
assert os.waitpid(serving, 0)[1] == 0
"""


def test_a_child_opens_a_handle_only_if_its_parent_has_none(etcd_endpoint, started):
    started.start(SCRIPT, etcd_endpoint, "fork").finish()
