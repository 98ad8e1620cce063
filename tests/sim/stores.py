"""The store that everybody shares, and a process's connection to it: requests get lost here."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from torch_ros.errors import ClosedError, StoreUnavailable
from torch_ros.memory.store import Space
from torch_ros.store.txn import Commit, Read, Sample, Watch


class Store(Space):
    """A `Space` that can be emptied, restarted and asked what changed last."""

    def __init__(self, world) -> None:
        super().__init__(world.clock)
        self.changed = SimpleNamespace(notify_all=lambda: None)
        self._world = world
        self.fresh: set[str] = set()  # keys that changed, since somebody looked

    @property
    def entries(self):
        return self._entries

    def _note(self, key: str, rev: int) -> None:
        super()._note(key, rev)
        self.fresh.add(key)

    def grant(self, ttl_s: int) -> int:
        lease_id = super().grant(ttl_s)
        self._due(ttl_s)
        return lease_id

    def keep_alive(self, lease_id: int) -> int:
        ttl_s = super().keep_alive(lease_id)
        self._due(ttl_s)
        return ttl_s

    def _due(self, ttl_s: int) -> None:
        self._world.at(self._world.now_s + ttl_s + 1e-6, self._end_leases)

    def _end_leases(self) -> None:
        self.expire_due()
        if self.fresh:
            self._world.store_changed("a lease ends")

    def wipe(self) -> None:
        """Its records are lost, and it starts to count from 1."""
        self.fresh.update(self._entries)
        self._entries.clear()
        self._keys.clear()
        self._changes.clear()
        self._leases.clear()
        self.rev = 1

    def restart(self) -> None:
        """As an election does: every lease begins anew."""
        for lease_id in list(self._leases):
            self.keep_alive(lease_id)


class Connection:
    """A process's `KV`."""

    endpoint = "sim://"

    def __init__(self, world, process) -> None:
        self.world, self.process, self.is_closed = world, process, False

    def read(self, request, *, timeout_s):
        view = self._ask(request, partial(self.world.store.read, request), timeout_s)
        samples = [sample for sample in request.ranges if isinstance(sample, Sample)]
        if not all(view.shows(sample.range) for sample in samples):
            self.world.saw("chosen among many" if samples[0].before else "some left out")
        return view

    def commit(self, txn, *, timeout_s):
        return self._ask(Commit(txn), partial(self.world.store.commit, txn), timeout_s)

    def grant(self, ttl_s, *, timeout_s):
        return self._ask("grant", partial(self.world.store.grant, ttl_s), timeout_s), ttl_s

    def keep_alive(self, lease_id, *, timeout_s):
        renew = partial(self.world.store.keep_alive, lease_id)
        return self._ask(f"keep alive {lease_id}", renew, timeout_s)

    def revoke(self, lease_id, *, timeout_s):
        self._ask(f"revoke {lease_id}", partial(self.world.store.expire, lease_id), timeout_s)

    def wait(self, watch, *, timeout_s):
        self._check()
        world = self.world
        world.about_to_watch(watch)
        if self.is_reachable and world.store.has_changed(watch):
            world.pause("watched")
            self._check()
            return True
        actor = world.current
        world.watchers[actor] = (actor.token, watch, self)
        woken = world.park(watch, world.now_s + timeout_s)
        world.watchers.pop(actor, None)
        self._check()
        return woken is not None

    def follow(self, request, *, timeout_s):
        self.wait(Watch(request.ranges, request.after_rev, request.reason), timeout_s=timeout_s)
        return self.world.store.changes(request) if self.is_reachable else None

    def close(self):
        self.is_closed = True
        for actor, (token, _, connection) in list(self.world.watchers.items()):
            if connection is self:
                self.world.wake(actor, token, "closed")

    @property
    def is_reachable(self) -> bool:
        now_s = self.world.now_s
        return self.process.cut_until_s <= now_s and self.world.down_until_s <= now_s

    def _ask(self, what, perform, timeout_s):
        self._check()
        world = self.world
        asked_s = world.now_s
        world.pause(what)
        self._check()
        world.refuse(self.process, what, timeout_s)
        is_late = world.now_s - asked_s > timeout_s
        fault = "lose reply" if is_late else world.request_fault(self)
        if not fault:
            return self._performed(what, perform)
        world.tell(world.current, what, fault.upper())
        if fault == "lose reply":
            perform()
            world.store_changed(what)
        elif fault == "late":
            world.at(world.now_s + world.random() * 12, self._late, world.current, what, perform)
        self.process.unsure_until_s = world.now_s + 13  # until a late one has applied
        if not is_late:
            world.park(f"no answer to {what}", world.now_s + timeout_s * world.random())
        self._check()
        raise StoreUnavailable(self.endpoint, timeout_s, fault)

    def _performed(self, what, perform):
        world = self.world
        reply = perform()
        world.current.wipes = world.wipes
        applied = getattr(reply, "applied", True)
        world.tell(world.current, what, "" if applied else "race lost")
        if not isinstance(what, Read):
            world.seen["write" if applied else "race lost"] += 1
            world.store_changed(what)
        if world.random() < 0.25:
            world.pause("the reply is on its way")
            self._check()
        return reply

    def _late(self, actor, what, perform) -> None:
        world = self.world
        reply = perform()
        world.tell(actor, what, f"LATE, applied: {getattr(reply, 'applied', True)}")
        world.leases_renewed_s = world.now_s  # it may have been a renewal
        before, world.current = world.current, actor
        world.store_changed(what)
        world.current = before

    def _check(self):
        if self.is_closed:
            raise ClosedError("the connection is closed")


def wakes(watch: Watch, keys) -> bool:
    for range_ in watch.ranges:  # loops: the simulator asks this more often than anything else
        for key in keys:
            if range_.start <= key < range_.end:
                return True
    return False
