"""Figures of fleets, as a scrape finds them."""
# needs features installs

import dataclasses

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from torch_ros.errors import BackendError, StoreUnavailable
from torch_ros.features.installs.records import Install, Rejection
from torch_ros.fleet.fleet import Fleet, Held, Published, Replica
from torch_ros.metrics.fleets import FIGURES, INSTALLS, PREFIX, FleetCollector
from torch_ros.protocol.records import VersionRef

OLD = VersionRef("run-a", 9, "u9", 1)
REFS = {number: VersionRef("run-b", number, f"u{number}", 2) for number in range(1, 9)}


def held(replica, ref, state="full", kind="replica", **more):
    options = {"is_offered": state == "full", "is_relay": False, "spot": False, **more}
    return Held(ref, replica, f"{replica}@0", "default", kind, state, world_size=2, **options)


def fleet(*there, model="policy", states=(), installs=()):
    refs = sorted({each.ref for each in there}, key=lambda ref: ref.order, reverse=True)
    published = [Published(ref, any(h.ref == ref for h in there), 3, 1 << 30) for ref in refs]
    states, installs = dict(states), dict(installs)
    replicas = {
        name: Replica(
            name,
            f"{name}@0",
            states.get(name, "complete"),
            "default",
            False,
            "run-b",
            2,
            install=installs.get(name),
        )
        for name in sorted({*states, *installs, *(each.replica for each in there)})
    }
    newest_first = sorted(there, key=lambda each: each.ref.order, reverse=True)
    return Fleet(model, 7, {"run-b": 2, "run-a": 1}, published, newest_first, replicas)


class Scraped:
    """A registry over fleets that change, and the samples that a scrape finds."""

    def __init__(self, *fleets):
        self.show(*fleets)
        self.now_s, self.registry, self.error = 100.0, CollectorRegistry(), None
        self.registry.register(FleetCollector(self.ask, lambda: self.now_s))

    def show(self, *fleets):
        self.fleets = {fleet.model: fleet for fleet in fleets}

    def ask(self):
        if self.error:
            raise self.error
        return self.fleets

    def samples(self):
        text = generate_latest(self.registry).decode()
        return {
            (sample.name.removeprefix(PREFIX), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def test_replicas_holdings_and_installs_are_counted_by_state():
    rejected = Install(2, REFS[4], None, REFS[4], Rejection(REFS[5], 0, "no"))
    found = Scraped(
        fleet(
            held("trainer", REFS[5], kind="original", readers=("r1", "r2")),
            held("r0", REFS[4]),
            held("r1", REFS[5], "filling", sources=("trainer",)),
            held("r2", REFS[5], "filling", sources=("trainer",)),
            states={"late": "joining"},
            installs={
                "r0": rejected,
                "r1": Install(1, None, REFS[5]),
                "r2": Install(),
                "r3": Install(1, REFS[5]),
            },
        )
    ).samples()
    states = {key[2]: value for key, value in found.items() if key[0] == "replicas"}
    assert states == {"joining": 1, "complete": 5, "refused": 0, "left": 0, "gone": 0}
    states = {key[2]: value for key, value in found.items() if key[0] == "holdings"}
    assert states == {"filling": 2, "full": 2, "draining": 0}
    assert [found["installs", "policy", state] for state in INSTALLS] == [1, 1, 1, 1]
    assert found["readers_in_flight", "policy"] == 2
    assert found["versions", "policy"] == 2
    assert (found["latest_version", "policy"], found["latest_bytes", "policy"]) == (5, 1 << 30)
    assert (found["latest_holders", "policy"], found["only_copy", "policy"]) == (1, 1)


def test_a_spot_replica_is_no_second_copy():
    two = [held("trainer", REFS[1], kind="original"), held("r0", REFS[1], spot=True)]
    assert Scraped(fleet(*two)).samples()["only_copy", "policy"] == 1
    two[1] = held("r0", REFS[1])
    assert Scraped(fleet(*two)).samples()["only_copy", "policy"] == 0
    both = [held("trainer", REFS[1], kind=kind) for kind in ("original", "copy")]
    assert Scraped(fleet(*both)).samples()["only_copy", "policy"] == 1  # of one replica
    assert Scraped(fleet()).samples()["only_copy", "policy"] == 0  # of nothing


def test_behind_is_in_numbers_of_the_newest_run():
    there = [
        held("trainer", REFS[8], kind="original"),
        held("trainer", REFS[2], kind="copy"),  # kept for others
        held("r0", REFS[5]),
        held("r1", REFS[3]),
        held("r1", REFS[7], "filling"),  # it still has version 3 only
        held("r2", OLD),
        held("r3", REFS[1]),
    ]
    shown = fleet(*there, states={"r3": "gone"})
    assert shown.behind() == {"r0": 3, "r1": 5, "r2": None}
    found = Scraped(shown).samples()
    assert (found["max_behind", "policy"], found["older_run_replicas", "policy"]) == (5, 1)
    assert Scraped(fleet()).samples()["max_behind", "policy"] == 0


def test_the_longest_drain_is_told_since_it_is_seen():
    scraped = Scraped(fleet(held("r0", REFS[1]), held("r1", REFS[1])))
    assert scraped.samples()["draining_seconds", "policy"] == 0
    scraped.show(fleet(held("r0", REFS[1], "draining"), held("r1", REFS[1])))
    scraped.samples()
    scraped.now_s += 20
    scraped.show(fleet(held("r0", REFS[1], "draining"), held("r1", REFS[1], "draining")))
    assert scraped.samples()["draining_seconds", "policy"] == 20
    scraped.now_s += 5
    scraped.show(fleet(held("r1", REFS[1], "draining")))
    assert scraped.samples()["draining_seconds", "policy"] == 5
    scraped.now_s += 5
    scraped.show(fleet(held("r1", REFS[2], "draining")))  # another one
    assert scraped.samples()["draining_seconds", "policy"] == 0


def test_an_etcd_that_is_away_leaves_no_old_figure():
    scraped = Scraped(fleet(held("r0", REFS[1])))
    assert scraped.samples()["etcd_up",] == 1
    scraped.error = StoreUnavailable("etcd://here", 4.0, "no answer")
    assert scraped.samples() == {("etcd_up",): 0}
    scraped.error = None
    assert scraped.samples()["latest_version", "policy"] == 1


def test_a_model_of_another_release_does_not_hide_the_others():
    scraped = Scraped(fleet(held("r0", REFS[1])))
    scraped.fleets["other"] = BackendError("release 9")
    found = scraped.samples()
    assert (found["readable", "policy"], found["readable", "other"]) == (1, 0)
    assert not [key for key in found if key[1:2] == ("other",) and key[0] != "readable"]


@pytest.mark.parametrize("name", ['"', "\\", "a\nb", '"} 1\ntorch_ros_fleet_etcd_up 0\n#', "é"])
def test_any_name_of_a_model_is_a_label(name):
    found = Scraped(fleet(held("r0", REFS[1]), model=name)).samples()
    assert (found["latest_version", name], found["etcd_up",]) == (1, 1)


def test_series_are_as_many_for_a_thousand_replicas_as_for_one():
    few = Scraped(fleet(held("r0", REFS[1]))).samples()
    there = [held(f"r{number}", REFS[1 + number % 8]) for number in range(1000)]
    many = Scraped(fleet(*there)).samples()
    assert many.keys() == few.keys()
    assert many["versions", "policy"] == 8


def test_each_state_that_there_is_has_a_figure():
    """A state that came to be later would be counted nowhere."""
    by_name = {figure.name: figure for figure in FIGURES}
    for name, kind in (("replicas", Replica), ("holdings", Held)):
        [field] = [each for each in dataclasses.fields(kind) if each.name == "state"]
        assert all(value in str(field.type) for value in by_name[name].values)
        assert by_name[name].values
