"""Processes that are killed or stopped in the middle of a transfer of a GiB."""

import re
import time
import uuid

import pytest
from kit import until

from puppets import Actor
from torch_ros.protocol.keys import Keys, parse_reader, replica_of
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Read, one

# Of UCX, when a TCP reader is killed while its source tries to send to it: docs/OPERATIONS.md.
UCX_ASSERTION = "stubs.c:107  Assertion"
LOST = re.compile(r"lost 'r1' \(.*, for ([0-9.]+) s\)")

pytestmark = [
    pytest.mark.parametrize(
        "surroundings",
        [{}, {"UCX_TLS": "tcp,self", "TORCH_ROS_TRANSPORT": "ucx"}, {"UCX_TLS": "tcp,self"}],
        ids=["cma", "ucx over tcp", "tcp"],
    ),
    pytest.mark.xdist_group("a GiB in each process"),
]


class Theatre:
    def __init__(self, endpoint, started, surroundings):
        self.model, self.started = "m-" + uuid.uuid4().hex[:8], started
        self.keys, self.kv = Keys(self.model), connect(endpoint, timeout_s=5)
        self.environment = {"TORCH_ROS_ENDPOINT": endpoint, **surroundings}

    def start(self, *names, **options):
        options = {"model": self.model, **options}
        actors = [Actor(self.started, name, self.environment, **options) for name in names]
        for actor in actors:
            assert actor.hear() == {"answer": "here"}
        return actors

    def await_there(self, is_there, range_, seconds=20):
        """Until the keys in `range_` are as wanted."""
        keys = lambda: set(self.kv.read(Read((range_,)), timeout_s=5).entries)
        until(lambda: is_there(keys()), seconds)

    def await_reader(self, reader, source):
        def is_there(keys):
            pairs = [parse_reader(key)[:2] for key in keys if not key.endswith("/group")]
            return (source, reader) in [(replica_of(s), replica_of(r)) for s, r in pairs]

        self.await_there(is_there, self.keys.readers())

    def await_gone(self, replica):
        self.await_there(lambda keys: not keys, one(self.keys.group(replica)))


@pytest.fixture
def theatre(etcd_endpoint, started, surroundings):
    made = Theatre(etcd_endpoint, started, surroundings)
    yield made
    made.kv.close()


def test_a_killed_source_costs_a_second_more_than_what_was_left_to_read(theatre):
    first, second, reader = theatre.start("first", "second", "reader")
    first.ask("fill", version=1)
    first.ask("publish", version=1)
    second.ask("replicate")
    undisturbed_s = min(read_and_leave(reader)["seconds"] for _ in range(2))
    pids = {actor.name: actor.process.pid for actor in (first, second)}
    found = reader.ask("replicate", at_half="kill", pids=pids)
    assert reader.ask("is_whole", version=1)
    survivor = ({"first", "second"} - {found["killed"]}).pop()
    assert (found["source"], found["reroutes"]) == (survivor, 1)
    after_s, left_s = found["ended_s"] - found["killed_s"], found["left"] * undisturbed_s
    print(
        f"{after_s:.2f} s after the kill, {left_s:.2f} s of it for the {found['left']:.0%} that "
        f"were left ({undisturbed_s:.2f} s for all): {after_s - left_s:+.2f} s"
    )
    assert after_s <= left_s + 5, "half of what it takes until a lease ends"
    assert f"lost '{found['killed']}'" in reader.log()
    assert f"going on from '{survivor}'" in reader.log()


def read_and_leave(reader):
    reader.tell("replicate")
    heard = reader.hear()
    reader.ask("unpublish")
    return heard


@pytest.mark.parametrize(
    ("ttl_s", "is_next_there"),
    [(2, False), (60, True)],
    ids=["beyond its lease", "within its lease"],
)
def test_what_a_stopped_reader_gets_of_tensors_that_were_taken_back_does_not_count(
    theatre, ttl_s, is_next_there
):
    (source,) = theatre.start("source", drain_s=0.5)
    (reader,) = theatre.start("reader", ttl_s=ttl_s, timeout_s=5)
    source.ask("fill", version=1)
    source.ask("publish", version=1)
    reader.tell("replicate", at_half="stop")
    reader.process.await_stop()
    source.tell("unpublish")
    assert source.hear()["seconds"] < 5
    source.ask("fill", version=2)
    if ttl_s == 2:
        theatre.await_gone("reader")
    if is_next_there:
        source.ask("publish", version=2)
    reader.resume()
    heard = reader.hear()
    if "error" in heard or reader.ask("version") is None:
        assert source.ask("list") == ({"2": ["source"]} if is_next_there else {})
        assert not reader.ask("is_whole", version=1)
        if not is_next_there:
            source.ask("publish", version=2)
        assert reader.ask("update", timeout_s=60) is True
    assert reader.ask("version") == 2
    assert reader.ask("is_whole", version=2)
    source.ask("close")
    (late,) = theatre.start("late")
    assert late.ask("replicate")["source"] == "reader"
    assert late.ask("is_whole", version=2)


def both_read_and_leave(*readers):
    """How long they take if they read at once, from each other: the processors are shared."""
    began_s = time.monotonic()
    for reader in readers:
        reader.tell("replicate")
    for reader in readers:
        reader.answer_of(reader.hear())
    took_s = time.monotonic() - began_s
    for reader in readers:
        reader.ask("unpublish")
    return took_s


@pytest.mark.parametrize("runs", [False, True], ids=["stopped", "running"])
def test_a_relay_that_is_killed_in_a_chain_of_four_is_replaced_by_its_source(theatre, runs):
    source, r1, r2, r3 = theatre.start("source", "r1", "r2", "r3")
    source.ask("fill", version=1)
    source.ask("publish", version=1)
    r1.tell("replicate", at_half="stop")
    r1.process.await_stop()
    r2.tell("replicate")
    theatre.await_reader("r2", "r1")
    r3.tell("replicate")
    theatre.await_reader("r3", "r2")
    if runs:
        r1.resume()
        time.sleep(0.02)  # the other half takes longer
    r1.process.kill()
    killed_s = time.monotonic()
    heard = {actor: actor.hear() for actor in (r2, r3)}
    print(f"the source, {source.process.poll()}: {source.log()[-2000:]}")
    if UCX_ASSERTION in source.log():  # it may not have ended yet
        assert all("error" in said for said in heard.values()), "nobody had all of it"
        pytest.xfail("UCX aborted the source, whose TCP reader was killed")
    found = {actor.name: actor.answer_of(said) for actor, said in heard.items()}
    print(f"{time.monotonic() - killed_s:.2f} s after the kill both have it")
    went_on = (found["r2"]["source"], found["r2"]["reroutes"])
    if runs and went_on == ("r1", 0):
        pytest.skip("the relay was through, and r2 with it, before it was killed")
    assert went_on == ("source", 1)
    assert (found["r3"]["source"], found["r3"]["reroutes"]) == ("r2", 0)
    for actor in (r2, r3):
        assert actor.ask("is_whole", version=1)
    assert "lost 'r1'" in r2.log()
    assert "going on from 'source'" in r2.log()
    assert "from 'r2'" in r3.log()


def test_a_relay_that_is_stopped_is_given_up_and_nothing_of_it_lands_late(theatre, surroundings):
    if not surroundings:
        pytest.skip("a stopped process's memory can be copied; only who is asked over TCP is mute")
    source, r2, r3 = theatre.start("source", "r2", "r3")
    (r1,) = theatre.start("r1", ttl_s=60)  # so that its lease does not tell
    source.ask("fill", version=1)
    source.ask("publish", version=1)
    undisturbed_s = min(both_read_and_leave(r2, r3) for _ in range(2))
    r1.tell("replicate", at_half="stop")
    theatre.await_reader("r1", "source")
    began_s = time.monotonic()
    r2.tell("replicate")
    r3.tell("replicate")
    r1.process.await_stop()
    heard = {actor: actor.hear() for actor in (r2, r3)}
    after_s = time.monotonic() - began_s
    found = {actor.name: actor.answer_of(said) for actor, said in heard.items()}
    lost = [LOST.findall(actor.log()) for actor in (r2, r3)]
    gave_up_s = max((float(seconds) for each in lost for seconds in each), default=0)
    print(
        f"{after_s:.2f} s after they began both have it, {gave_up_s} s of it for a stopped relay; "
        f"without it {undisturbed_s:.2f} s: {after_s - gave_up_s - undisturbed_s:+.2f} s; {found}"
    )
    assert sum(each["reroutes"] for each in found.values()) == len(lost[0]) + len(lost[1]) == 1
    assert after_s <= gave_up_s + undisturbed_s + 5
    for actor in (r2, r3):
        assert actor.ask("is_whole", version=1)
        actor.ask("unpublish")
        actor.ask("fill", version=2)
    r1.resume()
    assert r1.answer_of(r1.hear())["version"] == 1
    assert r1.ask("is_whole", version=1)
    assert r2.ask("is_whole", version=2)
    assert r3.ask("is_whole", version=2)
