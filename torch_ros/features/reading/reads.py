"""Versions that a handle reads without becoming a source of them, until it is told to `serve`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch_ros.deadline import Deadline
from torch_ros.errors import ContentChanged, UsageError
from torch_ros.features.reading import serving
from torch_ros.printable import log_of
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.records import Asked, Outcome, VersionRef
from torch_ros.protocol.seat import recorded
from torch_ros.protocol.versions import Spec
from torch_ros.shard.checkpoint import Load, LoadRequest, unanimous
from torch_ros.shard.collective import collectively
from torch_ros.shard.core import Shard
from torch_ros.shard.finding import Contents, find
from torch_ros.shard.report import ReadReport
from torch_ros.shard.tensors import Brought, Tensors, first_changed
from torch_ros.shard.verification import Verification, require_content, summed
from torch_ros.transfer.mailbox import Digests
from torch_ros.transfer.named import Named
from torch_ros.transfer.registered import LocalState, finish_kernels
from torch_ros.weights.digest import first_difference
from torch_ros.weights.manifest import Layout

log: logging.Logger = log_of(__name__)


class Given:
    """The destination of a read: the tensors that its caller has."""

    def __init__(self, tensors: Tensors, named_tensors: Named) -> None:
        self._tensors, self._named = tensors, named_tensors

    def fill(self, _: Sequence[Layout]) -> LocalState:
        state = self._tensors.state_of(self._named)
        if state.named is not None:
            state.named.require_in_use("read")
        return state

    def vet(self) -> None:
        """Nothing to do: no object is read."""


class ReadTensors(Load):
    """A load whose tensors stay registered, though nothing is served: a `serve` may follow."""

    def came(self, verification: Verification) -> None:
        """Note which version the tensors have, with digests: its owner may write to them since."""
        shard, digests, depth = self._shard, verification.known, self._shard.settings.depth
        registered = shard.tensors.registered
        if shard.digests.chunks:  # they were compared with the version's
            digests = shard.digests
        elif depth != "off" and not digests.totals and registered is not None:
            digests = Digests(depth, registered.digests(depth))  # of what landed
        shard.tensors.brought = Brought(verification.ref, digests, verification.wanted)

    def ends(self, *, has_read: bool) -> None:
        if not has_read and self._shard.held is None:
            self._shard.tensors.withdraw()


class Reads:
    """The reads of one handle that are no replications."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def contents(self, version: int | str, timeout_s: float | None) -> Contents:
        shard, spec = self._shard, Spec.parse(version)
        deadline = shard.deadline(f"contents {version}", timeout_s)
        return Contents.of(shard.busy(lambda: find(shard, spec, deadline)))

    def read(
        self,
        version: int | str,
        named_tensors: Named,
        timeout_s: float | None,
        *,
        is_partial: bool = False,
    ) -> ReadReport:
        shard, given = self._shard, Given(self._shard.tensors, named_tensors)
        request = LoadRequest(
            version, None, given, is_served=False, verb="read", is_partial=is_partial
        )

        def flow(deadline: Deadline) -> ReadReport:
            return ReadTensors(shard, request, deadline).run()

        return collectively(shard, request.asked, flow, timeout_s)

    def serve(self, timeout_s: float | None) -> int:
        def flow(deadline: Deadline) -> int:
            return Serving(self._shard, deadline).run()

        return collectively(self._shard, Asked("serve"), flow, timeout_s)


class Serving:
    """One rank's part in offering what the last read has brought."""

    def __init__(self, shard: Shard, deadline: Deadline) -> None:
        self._shard, self._deadline = shard, deadline
        self._brought: Brought | None = None

    def run(self) -> int:
        shard, asked = self._shard, self._shard.asked
        shard.begin("agree", asked.check, self._deadline)
        self._brought = brought = shard.tensors.brought  # a call, which may fail, forgets it
        if shard.is_alone:
            self._prove()
            self._compare()
        else:
            shard.make(GroupTask("agree", asked.check, self._deadline, self.check))
        try:
            return shard.make(GroupTask("replicate", asked, self._deadline, self.offer))
        except BaseException:
            shard.tensors.brought = brought
            raise

    def check(self, call: GroupCall) -> None:
        """Go on only if all ranks have the same version, with the digests that it has."""
        ref = self._prove()
        call.decide((), recorded)

        def sum_up(said: Mapping[int, str]) -> None:
            if not unanimous(said.values()):
                raise UsageError(
                    f"serve: the ranks have read different versions: {said}; make the same "
                    "reads on all ranks"
                )
            self._compare()
            call.complete(Outcome())

        call.finish(f"{ref.run}/{ref.version}/{ref.uid}", sum_up)

    def _prove(self) -> VersionRef:
        """Digest this rank's memory, and compare it with what landed there, if that is known."""
        shard, brought, registered = self._shard, self._brought, self._shard.tensors.registered
        if brought is None or registered is None:
            raise UsageError(
                "serve: nothing was read since the last publish, replicate, register or serve; "
                "call read(version, tensors) first, on all ranks"
            )
        shard.require_nothing_held("serve")
        finish_kernels(registered.cuda_devices)
        known = brought.digests
        now = registered.digests(known.depth)
        fqn = first_changed(registered, known.chunks, now) if known.chunks else None
        if fqn is not None:
            raise ContentChanged(brought.ref.version, fqn)
        shard.digests = digests = replace(known, chunks=now)
        if known.totals:  # readers compare those of other sources with them
            shard.mailbox.show_digests(digests)
        return brought.ref

    def _compare(self) -> None:
        """Compare the digests of all ranks with those of the version, where these are known.

        Raises: ContentChanged: They are others.
        """
        assert self._brought is not None
        version, known = self._brought.ref.version, self._brought.digests
        if not known.totals:
            return
        found = summed(self._shard.manifests.own(self._deadline), known.depth)
        if (fqn := first_difference(found, known.totals)) is not None:
            raise ContentChanged(version, fqn)

    def offer(self, call: GroupCall) -> int:
        """Set the word: from here on this memory is the version's, until it is unpublished."""
        shard, brought, registered = self._shard, self._brought, self._shard.tensors.registered
        assert brought is not None
        assert registered is not None
        ref, seat = brought.ref, shard.group.seat
        call.decide(serving.serve_ranges(seat, ref), partial(serving.serve, ref=ref))
        if call.has_ended:  # while this rank had no seat; its part was done
            shard.word.serve_held()
            return ref.version
        shard.tensors.offered()
        shard.word.serve(call.mark)

        def sum_up(said: Mapping[int, str]) -> None:
            end = shard.manifests.together(registered, said, self._deadline)
            require_content(shard, ref, brought.wanted, end, self._deadline)
            call.complete(end)

        call.finish(registered.sharding.digest, sum_up)
        log.info("serving version %d of %r", ref.version, shard.model)
        return ref.version
