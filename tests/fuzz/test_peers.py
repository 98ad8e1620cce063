"""Whatever a peer shows, a reader with another source gets its weights from that one.

TORCH_ROS_FUZZ=n tries n times as much: 100 makes 2,000 reads in memory and 200 over NIXL.
"""

import contextlib
import itertools
import os
import uuid
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit import inside

import torch_ros
from torch_ros.digests import digest_of
from torch_ros.errors import CorruptWeights, SourceLost, TorchRosError
from torch_ros.protocol import reaching
from torch_ros.spans import Region
from torch_ros.transfer import feed
from torch_ros.transfer.card import MAILBOX_BYTES, Notice
from torch_ros.weights.manifest import Manifest

TIMES = int(os.environ.get("TORCH_ROS_FUZZ", "1"))
TENSORS = {"x": (3, 40), "y": (7,), "z": ()}
WITHIN_S = 20  # of each read; on an idle machine it takes 10 ms

number = itertools.count()
wrong = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([-1, 0, 1, 3, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=40),
    st.lists(st.integers(0, 9), max_size=3),
)


@st.composite
def spoiled(draw):
    """What is wrong, and where: a path into what is shown, and something else for that place."""
    kind = draw(st.sampled_from(["mailbox", "bytes", "notice", "manifest", "manifest", "word"]))
    return kind, draw(st.lists(st.integers(0, 9), max_size=6)), draw(wrong), draw(st.booleans())


def replaced(value, path, other):
    """`value`, a tree of lists and dicts, with `other` at some place."""
    if not path or not isinstance(value, list | dict) or not value:
        return other
    changed = dict(value) if isinstance(value, dict) else list(value)
    key = list(value)[path[0] % len(value)] if isinstance(value, dict) else path[0] % len(value)
    changed[key] = replaced(value[key], path[1:], other)
    return changed


def write(mailbox, notice, *, is_torn=False):
    """Show these bytes as the notice."""
    notice = notice[: MAILBOX_BYTES - 32]
    digest = bytes(16) if is_torn else digest_of(notice)
    box = np.frombuffer(len(notice).to_bytes(8, "little") + digest + notice, np.uint8)
    mailbox._memory[8 : 8 + len(box)] = box


def spoil(mailbox, what):
    """Returns the manifest that is shown instead, if it is one."""
    kind, path, other, is_torn = what
    posted = mailbox._manifests[0]
    match kind:
        case "mailbox":
            length = (other if isinstance(other, int) else 2**63) % 2**64
            mailbox._memory[8:16] = np.frombuffer(length.to_bytes(8, "little"), np.uint8)
        case "bytes":
            write(mailbox, repr(other).encode() + bytes(path), is_torn=is_torn)
        case "notice":
            fields = msgspec.msgpack.decode(posted.notice[24:])
            write(mailbox, msgspec.msgpack.encode(replaced(fields, path[:1], other)))
        case "manifest" | "more":
            fields = msgspec.msgpack.decode(posted.manifest.encode())
            if kind == "more":  # a tensor that nobody published
                fields[0][0].append(["z9", *fields[0][0][-1][1:]])
            else:
                fields = replaced(fields, path, other)
            content = msgspec.msgpack.encode(fields)
            spoil.kept = buffer = np.frombuffer(bytearray(content or b"\0"), np.uint8)
            region = Region(buffer.ctypes.data, buffer.nbytes)
            registration = mailbox._transport.register([region])
            where = buffer.ctypes.data, buffer.nbytes, digest_of(content)
            write(mailbox, msgspec.msgpack.encode(Notice(*where, registration.descriptor)))
            with contextlib.suppress(TorchRosError):
                return Manifest.decode(content)
        case "word":
            value = other if isinstance(other, int) else 0
            mailbox._word[0] = value % 2**64
    return None


@contextlib.contextmanager
def replicas(transport, *names):
    """Handles of a model of their own; the first publishes, all others but the last hold a copy."""
    model = f"m{next(number)}-{uuid.uuid4().hex[:6]}"
    options = {
        "endpoint": "memory://fuzz",
        "transport": transport,
        "timeout_s": WITHIN_S,
        "digests": "full",
    }
    with contextlib.ExitStack() as stack:
        handles = [
            stack.enter_context(torch_ros.open(model, replica=name, **options)) for name in names
        ]
        for index, handle in enumerate(handles):
            handle.register(
                {
                    fqn: torch.full(shape, float(ord(fqn)) if index == 0 else 0.0)
                    for fqn, shape in TENSORS.items()
                }
            )
        handles[0].publish(1)
        for handle in handles[1:-1]:
            handle.replicate(1)
        yield handles


@contextlib.contextmanager
def quick():
    """What is waited for a second or so is waited for a moment."""
    with patch.object(feed, "TORN_S", 0.02), patch.object(reaching, "RETRY_S", 0.01):
        yield


def reads_from_the_good(transport, what):
    with quick(), replicas(transport, "bad", "good", "me") as all_:
        bad, _, me = all_
        before = inside(bad).mailbox.manifest
        shown = spoil(inside(bad).mailbox, what)
        mine = {fqn: torch.zeros(shape) for fqn, shape in TENSORS.items()}
        me.unregister()
        me.register(mine)
        assert me.replicate(1) == 1
        is_right = all(bool((tensor == ord(fqn)).all()) for fqn, tensor in mine.items())
        lies = shown is not None and (shown.layout, shown.addresses) != (
            before.layout,
            before.addresses,
        )
        # Who shows other memory of his as the tensors gives it away as such: no reader can know.
        assert is_right or (lies and me.last_read.source == "bad")


long = settings(
    deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, database=None
)


@pytest.mark.timeout(120 + 10 * TIMES)
@settings(long, max_examples=20 * TIMES)
@given(spoiled())
@example(("manifest", [0, 0, 0, 0], "", False))
@example(("more", [], None, False))
def test_a_bad_peer_fails_nobody_who_has_another(what):
    reads_from_the_good("auto", what)


@pytest.mark.long
@pytest.mark.timeout(120 + 30 * TIMES)
@settings(long, max_examples=2 * TIMES)
@given(spoiled())
def test_a_bad_peer_fails_nobody_over_nixl(what):
    reads_from_the_good("ucx", what)


@pytest.mark.timeout(120 + 10 * TIMES)
@settings(long, max_examples=5 * TIMES)
@given(spoiled())
@example(("manifest", [5, 0], 0, False))
def test_a_bad_peer_alone_is_named(what):
    with quick(), replicas("auto", "bad", "me") as (bad, me):
        spoil(inside(bad).mailbox, what)
        try:
            me.replicate(1)
        except SourceLost as lost:
            assert lost.replica == "bad"
        except CorruptWeights as corrupt:
            assert corrupt.source == "bad"
