"""Every error survives the trip between ranks, by pickle and by etcd, and is in the tree."""

import copy as copying
import inspect
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


def fields_of(kind):
    """A value for each field of its constructor, by name; none: it takes a text."""
    made_by = next(base for base in kind.__mro__ if "__init__" in vars(base))
    if not issubclass(made_by, errors.TorchRosError):
        return {}
    types = typing.get_type_hints(made_by.__init__)
    return {name: SAMPLE[field] for name, field in types.items() if name != "return"}


def example(kind):
    return kind(*(fields_of(kind).values() or ["what happened"]))


def named(kind):
    """An error made by the names of its fields, where its constructor takes those."""
    if not (fields := fields_of(kind)):
        return example(kind)
    parameters = inspect.signature(kind).parameters.values()
    takes_names = all(field.kind is field.POSITIONAL_OR_KEYWORD for field in parameters)
    return kind(**fields) if takes_names else example(kind)


@pytest.mark.parametrize("trip", [lambda e: pickle.loads(pickle.dumps(e)), copying.copy])
@pytest.mark.parametrize("made", [example, named])
@pytest.mark.parametrize("kind", EVERY)
def test_an_error_comes_from_a_trip_as_itself(kind, made, trip):
    error = made(kind)
    copy = trip(error)
    assert error.args == example(kind).args
    assert (type(copy), str(copy), vars(copy)) == (kind, str(error), vars(error))
    assert (copy.args, repr(copy)) == (error.args, repr(error))
    assert repr(error) == f"{kind.__name__}({', '.join(map(repr, error.args))})"
    assert len({error, copy}) == 2, "an error is itself alone, and can be hashed"


@pytest.mark.parametrize("made", [example, named])
@pytest.mark.parametrize("kind", EVERY)
def test_a_peer_gets_the_same_error(kind, made):
    failure = Failure.of(made(kind), replica="r", call=3, rank=1)
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
