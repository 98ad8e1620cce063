"""Offering tensors as a version: one rank's part in it, with a report of how long it took."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch_ros.deadline import Deadline
from torch_ros.printable import log_of
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.versions import check_version
from torch_ros.shard.core import Shard
from torch_ros.shard.publishers import require_equal_to_elder
from torch_ros.shard.report import PublishReport, Stopwatch
from torch_ros.transfer.mailbox import Digests
from torch_ros.transfer.registered import LocalState, finish_kernels

log: logging.Logger = log_of(__name__)


@dataclass(frozen=True, slots=True)
class Content:
    """The tensors to offer.

    Args:
        tensors: Registers them, or finds the registered ones; called within the call of the group.
        more: Says which addresses readers of this uid shall know, by name. The second argument:
            whether the uid is offered as soon as the call ends, or only when etcd is back.
    """

    tensors: Callable[[], LocalState]
    more: Callable[[str, bool], Mapping[str, int]] = lambda *_: {}


def publish(
    shard: Shard, version: int, content: Content, deadline: Deadline, store_wait_s: float | None
) -> bool:
    """Offer tensors as a version. False: only once etcd is back, which was away `store_wait_s`."""
    asked, made = shard.asked, _Publication(shard, version, content, deadline, store_wait_s)
    with shard.tracing.around("publish", version=version):
        task = GroupTask("publish", asked, deadline, made.perform, store_wait_s, made.go_on_without)
        return shard.make(task)


@dataclass(frozen=True, slots=True)
class _Publication:
    """One rank's part in a publish, over all tries."""

    shard: Shard
    version: int
    content: Content
    deadline: Deadline
    store_wait_s: float | None
    watch: Stopwatch = field(default_factory=Stopwatch)

    def perform(self, call: GroupCall) -> bool:
        """Show the tensors, and end the call with the peers; once more if the call begins again."""
        shard, watch = self.shard, self.watch
        if call.may_hold is None:  # else a try before may have ended well, and readers have come
            shard.word.void_unless_held()  # the last call may have ended badly
        watch.lap("decide")
        registered = self.content.tensors()  # which may fail, so before anything is decided
        watch.lap("tensors")
        call.decide_to_publish(check_version(self.version), shard.tracing.traceparent())
        watch.lap("decide")
        _show(shard, self.content, call, registered, is_offered=True)
        watch.lap("digest")

        def sum_up(said: Mapping[int, str]) -> None:
            end = shard.manifests.together(registered, said, self.deadline)
            require_equal_to_elder(shard, call, end.said, self.deadline)
            call.complete(end)

        call.finish(registered.sharding.digest, sum_up)
        if call.ref.uid != call.fresh_uid:  # compared with the first publisher's, where one can
            shard.word.serve(call.mark, registered.buffer)
        watch.lap("commit")
        self._report(call, registered, is_offered=True)
        log.info("published version %d of %r", self.version, shard.model)
        return True

    def go_on_without(self, call: GroupCall) -> bool:
        """Show the tensors in place of `perform`, while etcd is away: offered when it is back."""
        shard, watch = self.shard, self.watch
        watch.lap("decide")
        registered = self.content.tensors()
        watch.lap("tensors")
        end = shard.manifests.alone(registered)
        call.traceparent = shard.tracing.traceparent()
        call.go_on_without(check_version(self.version), registered.sharding.digest, end)
        _show(shard, self.content, call, registered, is_offered=False)
        watch.lap("digest")
        _say_not_waited(shard, self.version, self.store_wait_s)
        self._report(call, registered, is_offered=False)
        return False

    def _report(self, call: GroupCall, registered: LocalState, *, is_offered: bool) -> None:
        self.shard.reports.add(
            PublishReport(
                version=self.version,
                bytes_total=registered.bytes_total,
                is_offered=is_offered,
                elapsed_s=self.watch.elapsed_s,
                stages_s=self.watch.stages_s,
                call=call.number,
                began_ms=self.watch.began_ms,
                uid=call.ref.uid,
                turns=call.turns,
            )
        )


def _say_not_waited(shard: Shard, version: int, store_wait_s: float | None) -> None:
    """Warn that the version is not offered yet; in an outage, all but the first are at INFO."""
    before = [each for each in shard.reports.last() if isinstance(each, PublishReport)]
    is_told = bool(before) and not before[-1].is_offered
    log.log(
        logging.INFO if is_told else logging.WARNING,
        "version %d of %r is held, and offered when etcd is back: the call did not wait for it "
        "(store_wait_s=%g)",
        *(version, shard.model, store_wait_s),
    )


def _show(
    shard: Shard, content: Content, call: GroupCall, registered: LocalState, *, is_offered: bool
) -> None:
    """Digest the tensors, and set the word: they are the call's version, which may be read now.

    `is_offered`: it is offered as soon as the call ends; else when etcd is back.
    """
    finish_kernels(registered.cuda_devices)
    shard.tensors.offered()
    depth = shard.settings.depth
    shard.digests = Digests(depth, registered.digests(depth))
    shard.mailbox.show_digests(shard.digests, content.more(call.ref.uid, is_offered))
    if call.ref.uid == call.fresh_uid:
        shard.word.serve(call.mark, registered.buffer)
    else:  # another one published it first, perhaps other bytes: nothing is read before the end
        shard.word.show_nothing(call.mark, registered.buffer)
