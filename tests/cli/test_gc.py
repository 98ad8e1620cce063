"""`torch-ros gc`: what is left behind by nobody alive goes, and nothing that somebody uses."""

import json
import os
import time

import pytest
import torch
from kit import inside, published

from torch_ros.cli import clearing, main
from torch_ros.cli.leftovers import clearing as first_of
from torch_ros.cli.leftovers import leftovers
from torch_ros.fleet import life
from torch_ros.protocol import schema
from torch_ros.protocol.keys import EVERY_MODEL, Keys
from torch_ros.protocol.records import (
    GroupRecord,
    RunRecord,
    SchemaRecord,
    SeenRecord,
    VersionRecord,
)
from torch_ros.store.txn import Created, Delete, Put, Read, Txn, under


@pytest.fixture
def asked(asked):
    def ask(*arguments):
        code, out, err = asked("--json", *arguments)
        return code, json.loads(out) if out else None, err

    return ask


def put(store, *records):
    ops = tuple(Put(key, record.encode()) for key, record in records)
    assert store.commit(Txn((), ops), timeout_s=5).applied


def keys_of(store, model):
    found = store.read(Read((EVERY_MODEL,)), timeout_s=5).entries
    return {key for key in found if key.startswith(f"{Keys(model).root}/")}


def test_a_model_without_anybody_goes_whole_and_only_when_told(opened, asked, store):
    trainer = opened("trainer")
    published(trainer, 7)
    trainer.close()
    before = keys_of(store, trainer.model)
    assert before
    code, said, _ = asked("gc", trainer.model)
    assert (code, said["schema"], said["is_deleted"]) == (0, 1, False)
    assert {each["key"] for each in said["leftovers"]} == before == keys_of(store, trainer.model)
    code, said, _ = asked("gc", trainer.model, "--yes")
    assert (code, said["is_deleted"], len(said["leftovers"])) == (0, True, len(before))
    assert keys_of(store, trainer.model) == set()
    assert asked("gc", trainer.model)[0] == 2  # there is no such model
    again = opened("trainer")
    published(again, 1)
    assert again.fleet().latest.version == 1


def test_nothing_goes_that_somebody_has_or_may_come_back_to(opened, asked, store):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 7)
    rollout.register({"w": torch.ones(4)})
    rollout.replicate()
    trainer.unpublish()
    rollout.unpublish()  # nobody holds 7, and numbers must not go back
    keys = Keys(trainer.model)
    put(store, (keys.version(trainer.run, 9), VersionRecord("w")))  # of a publication that failed
    before = keys_of(store, trainer.model)
    assert asked("gc", trainer.model, "--yes")[1]["leftovers"] == []
    assert keys_of(store, trainer.model) == before


def test_runs_and_versions_that_were_superseded_go(opened, asked, store):
    trainer = opened("trainer")
    published(trainer, 7)
    keys, run = Keys(trainer.model), trainer.run
    dead, later = RunRecord("host:1", 0), RunRecord("host:1", 9)
    put(
        store,
        (keys.run("dead"), dead),
        (keys.version("dead", 3), VersionRecord("u", "x/1/1")),
        (keys.run("later"), later),  # its number would come again
        (keys.version(run, 5), VersionRecord("v", "x/1/1")),
        (keys.version(run, 9), VersionRecord("w")),  # a publication that failed
    )
    gone = {keys.run("dead"), keys.version("dead", 3), keys.version(run, 5)}
    code, said, _ = asked("gc", trainer.model, "--yes")
    assert (code, {each["key"] for each in said["leftovers"]}) == (0, gone)
    assert {keys.run("later"), keys.version(run, 7)} <= keys_of(store, trainer.model)
    assert trainer.fleet().latest.version == 7


def test_what_hangs_on_no_lease_goes_though_it_cannot_be_read(opened, asked, store):
    trainer = opened("trainer")
    published(trainer, 7)
    root = Keys(trainer.model).root
    odd = {f"{root}/holdings/x", f"{root}/groups/ghost", f"{root}/what/is/this"}
    store.commit(Txn((), tuple(Put(key, b"?") for key in odd)), timeout_s=5)
    code, said, _ = asked("gc", trainer.model, "--yes")
    assert (code, {each["key"] for each in said["leftovers"]}) == (0, odd)
    assert trainer.fleet().latest.version == 7


@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_a_key_that_nobody_can_print_goes_too(opened, asked, store, endpoint, capsys):
    trainer = opened("trainer")
    odd = f"{Keys(trainer.model).root}/\udcff\x1b[31m"
    store.commit(Txn((), (Put(odd, b"?"),)), timeout_s=5)
    assert main.main(["--endpoint", endpoint, "gc", trainer.model]) == 0
    assert r"/\udcff\x1b[31m  " in capsys.readouterr().out
    code, said, _ = asked("gc", trainer.model, "--yes")
    assert (code, len(said["leftovers"])) == (0, 1)
    assert said["leftovers"][0]["key"].endswith("\\udcff\x1b[31m")
    assert odd not in keys_of(store, trainer.model)


def test_a_model_of_another_release_is_left_alone(opened, asked, store):
    trainer = opened("trainer")
    trainer.close()
    put(store, (Keys(trainer.model).schema(), SchemaRecord(99, "9")))
    code, _, err = asked("gc", trainer.model, "--yes")
    there = keys_of(store, trainer.model)
    store.commit(Txn((), (Delete(under(f"{Keys(trainer.model).root}/")),)), timeout_s=5)
    assert (code, "release 9" in err) == (3, True)
    assert there


# One request at a time: somebody comes between the look and the deletion.


def look(store, model):
    keys = Keys(model)
    return leftovers(store.read(Read((keys.all(),)), timeout_s=5), keys)


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_who_opens_in_between_keeps_all(opened, store):
    trainer = opened("trainer")
    published(trainer, 7)
    trainer.close()
    seen = first_of(look(store, trainer.model))
    opened("newcomer")
    before = keys_of(store, trainer.model)
    assert not store.commit(seen, timeout_s=5).applied
    assert keys_of(store, trainer.model) == before


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_who_begins_to_use_a_dead_run_keeps_it(opened, store):
    trainer = opened("trainer")
    put(store, (Keys(trainer.model).run("dead"), RunRecord("host:1", 0)))
    seen = first_of(look(store, trainer.model))
    opened("newcomer", run="dead")
    assert not store.commit(seen, timeout_s=5).applied


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_who_comes_back_to_a_dead_run_keeps_it(opened, store):
    trainer = opened("trainer")
    keys = Keys(trainer.model)
    put(store, (keys.run("dead"), RunRecord("host:1", 0)))
    seen = first_of(look(store, trainer.model))
    lease = inside(trainer).group.session.lease_id
    back = GroupRecord("0123abcd.01234567", 1, "dead")
    store.commit(Txn((), (Put(keys.group("back"), back.encode(), lease),)), timeout_s=5)
    assert not store.commit(seen, timeout_s=5).applied
    assert look(store, trainer.model) == []


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_an_old_version_that_comes_back_stays(opened, store):
    trainer, other = opened("trainer"), opened("other")
    published(trainer, 7)
    keys, run = Keys(trainer.model), trainer.run
    put(store, (keys.version(run, 5), VersionRecord("v", "x/1/1")))
    seen = first_of(look(store, trainer.model))
    lease = inside(other).group.session.lease_id
    held = keys.holding(run, 5, "default", inside(other).group.seat.inst)
    store.commit(Txn((), (Put(held, b"{}", lease),)), timeout_s=5)
    assert not store.commit(seen, timeout_s=5).applied
    assert look(store, trainer.model) == []


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_who_opens_after_a_look_of_before_puts_the_schema_again(opened, store):
    trainer = opened("trainer")
    trainer.close()
    keys = Keys(trainer.model)
    view = store.read(Read((keys.all(),)), timeout_s=5)
    ops, guards = schema.put_own(view, keys)
    assert (ops, guards) == ((), (Created(keys.schema(), view.entries[keys.schema()].create_rev),))
    clearing.clear(store, trainer.model)
    assert not store.commit(Txn(guards), timeout_s=5).applied
    ops, _ = schema.put_own(store.read(Read((keys.all(),)), timeout_s=5), keys)
    assert [op.key for op in ops] == [keys.schema()]


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_many_go_in_several_transactions(opened, store):
    trainer = opened("trainer")
    published(trainer, 900)
    keys, run = Keys(trainer.model), trainer.run
    for first in (0, 100):
        several = range(first, first + 100)
        put(store, *((keys.version(run, n), VersionRecord(str(n), "x/1/1")) for n in several))
    assert len(clearing.clear(store, trainer.model)) == 200
    assert look(store, trainer.model) == []


def test_who_lost_a_seat_stays_named_while_somebody_may_look_for_it(opened, asked, store):
    trainer = opened("trainer")
    published(trainer, 7)
    keys, own, now_ms = Keys(trainer.model), life.own(), int(1000 * time.time())
    elsewhere = own._replace(boot="another")._asdict()
    week_ms = clearing.FORGOTTEN_MS
    put(
        store,
        (keys.seen_at("lives", 0), SeenRecord("h", os.getpid(), 1, **own._asdict())),
        (keys.seen_at("closed", 0), SeenRecord("h", os.getpid(), 1, *own._replace(sign="0bad"))),
        (keys.seen_at("ended", 0), SeenRecord("h", 2**62, now_ms, **own._asdict())),
        (keys.seen_at("elsewhere", 3), SeenRecord("h", 1, now_ms, **elsewhere)),
        (keys.seen_at("forgotten", 0), SeenRecord("h", 1, now_ms - week_ms - 1, **elsewhere)),
    )
    gone = {keys.seen_at(name, 0) for name in ("closed", "ended", "forgotten")}
    before = keys_of(store, trainer.model)
    code, said, _ = asked("gc", trainer.model, "--yes")
    assert (code, {each["key"] for each in said["leftovers"]}) == (0, gone)
    assert keys_of(store, trainer.model) == before - gone


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_who_takes_a_lost_seat_meanwhile_stays_named(opened, store):
    trainer = opened("trainer")
    keys = Keys(trainer.model)
    put(store, (keys.seen_at("r", 0), SeenRecord("h", 2**62)))
    view = store.read(Read((keys.all(),)), timeout_s=5)
    seen = first_of(leftovers(view, keys, lambda _: True))
    assert [op.range.start for op in seen.ops] == [keys.seen_at("r", 0)]
    opened("r")
    assert not store.commit(seen, timeout_s=5).applied
