"""Every error survives the trip between ranks, by pickle and by etcd, and is in the tree."""

import pickle
import typing

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from torch_ros import errors
from torch_ros.protocol.records import Failure

SAMPLE = {str: "x", int: 7, float: 1.5, bool: True}
EVERY = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.TorchRosError)
]


def example(kind):
    made_by = next(base for base in kind.__mro__ if "__init__" in vars(base))
    if not issubclass(made_by, errors.TorchRosError):
        return kind("what happened")
    fields = typing.get_type_hints(made_by.__init__)
    fields.pop("return")
    return kind(*(SAMPLE[field] for field in fields.values()))


@pytest.mark.parametrize("kind", EVERY)
def test_an_error_unpickles_as_itself(kind):
    error = example(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (kind, str(error), vars(error))
    assert (copy.args, repr(copy)) == (error.args, repr(error))
    assert repr(error) == f"{kind.__name__}({', '.join(map(repr, error.args))})"
    assert len({error, copy}) == 2, "an error is itself alone, and can be hashed"


@pytest.mark.parametrize("kind", EVERY)
def test_a_peer_gets_the_same_error(kind):
    failure = Failure.of(example(kind), replica="r", call=3, rank=1)
    told = Failure.decode(failure.encode(), "decisions").error()
    expected = errors.CallAborted if issubclass(kind, errors.SeatLost) else kind
    assert type(told) is expected
    assert "rank 1" in told.__notes__[0]


def test_an_error_that_is_not_ours_reaches_peers_with_its_text():
    told = Failure.of(RuntimeError("boom"), replica="r", call=3, rank=1).error()
    assert isinstance(told, errors.CallAborted)
    assert "RuntimeError: boom" in str(told)


def test_an_unknown_kind_from_etcd_runs_nothing():
    told = Failure("print", ["owned"], 0).error()
    assert type(told) is errors.PeerError


def test_every_error_is_in_the_tree():
    for kind in EVERY:
        assert f"* {kind.__name__}" in errors.__doc__


def test_the_reason_of_what_dcp_raises_is_that_of_the_lowest_rank():
    first, second = errors.PeerError("a"), errors.PeerError("b")
    raised = CheckpointException("load", {2: (second, None), 1: (first, None)})
    assert errors.reason(raised) is first
    assert errors.reason(first) is first


@pytest.mark.parametrize(
    ("counted", "found"), [((3, 9), ") after 3 of 9 bytes, and"), ((0, 0), "), and")]
)
def test_a_lost_source_tells_how_far_the_read_was_if_somebody_counted(counted, found):
    assert found in str(errors.SourceLost("trainer", "it left", *counted))
