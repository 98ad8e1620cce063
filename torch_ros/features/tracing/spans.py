"""Spans of OpenTelemetry around calls, in programs that trace; in others nothing, and no import.

The only module that knows OpenTelemetry, of which it takes the API alone. A call waits only for its
span to begin. Attributes, the spans of stages and the end are made from the call's report, by a
thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from torch_ros.printable import log_of
from torch_ros.release import RELEASE
from torch_ros.shard.core import Shard
from torch_ros.shard.report import DrainReport, PublishReport, ReadReport, Report
from torch_ros.shard.seams import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

log: logging.Logger = log_of(__name__)

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
FLUSH_S = 2.0  # for the spans that are left, at the end of the process


@dataclass(slots=True)
class _Call:
    """A call that is traced: all that its span is made of."""

    span: Span
    attributes: dict[str, AttributeValue]
    report: Report | None = None
    error: BaseException | None = None
    links: list[str] = field(default_factory=list)
    ended_ns: int = 0


_open: ContextVar[_Call | None] = ContextVar("torch_ros_span", default=None)


@contextmanager
def spanned(name: str, **attributes: AttributeValue) -> Iterator[None]:
    """The current span within, `torch_ros.NAME`, if the program has an SDK that records it."""
    # A program that traces has imported this.
    if "opentelemetry.trace" not in sys.modules:
        yield
        return
    from opentelemetry import context, trace  # noqa: PLC0415  # it is there

    span = _tracer().start_span(f"torch_ros.{name}")
    if not span.is_recording():
        yield
        return
    call = _Call(span, attributes)
    before, token = _open.set(call), context.attach(trace.set_span_in_context(span))
    try:
        yield
    except BaseException as error:
        call.error = error
        raise
    finally:
        context.detach(token)
        _open.reset(before)
        call.ended_ns = time.time_ns()
        _ending().put(call)


class Spans(Tracing):
    """Spans of one shard's calls."""

    def __init__(self, shard: Shard) -> None:
        seat = shard.group.seat
        self._labels: dict[str, str | int] = {
            "model": shard.model,
            "replica": seat.replica,
            "rank": seat.rank,
        }
        shard.reports.listeners.append(_told)

    def around(self, name: str, **attributes: int) -> AbstractContextManager[None]:
        return spanned(name, **self._labels, **attributes)

    def traceparent(self) -> str:
        if (call := _open.get()) is None:
            return ""
        at = call.span.get_span_context()
        return f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}"

    def link(self, parent: str) -> None:
        if (call := _open.get()) is not None and parent:
            call.links.append(parent)


def _told(report: Report) -> None:
    if (call := _open.get()) is not None:
        call.report = report


def flush(timeout_s: float = FLUSH_S) -> None:
    """Wait for the spans of calls that have returned."""
    if not _ending.cache_info().currsize:  # none has; a child that was forked has its parent's exit
        return
    is_done = threading.Event()
    _ending().put(is_done)
    is_done.wait(timeout_s)


@cache
def _tracer() -> Tracer:
    from opentelemetry import trace  # noqa: PLC0415

    return trace.get_tracer("torch_ros", RELEASE)


_Queue = queue.SimpleQueue["_Call | threading.Event"]


@cache
def _ending() -> _Queue:
    """The calls that have returned, for the thread that ends their spans."""
    calls: _Queue = queue.SimpleQueue()
    threading.Thread(target=_run, args=(calls,), name="torch_ros spans", daemon=True).start()
    atexit.register(flush)
    return calls


os.register_at_fork(after_in_child=_ending.cache_clear)  # the thread is the parent's


def _run(calls: _Queue) -> None:
    while True:
        call = calls.get()
        if isinstance(call, threading.Event):
            call.set()
            continue
        try:
            _end(call)
        except Exception:
            log.exception("a span was not ended")  # by the SDK of the program, or its processors
        del call  # its error has the frames of its caller, with their tensors


def _end(call: _Call) -> None:
    from opentelemetry import trace  # noqa: PLC0415

    span, report = call.span, call.report
    attributes = call.attributes | (_attributes(report) if report else {})
    span.set_attributes({f"torch_ros.{name}": value for name, value in attributes.items()})
    for parent in call.links:
        if found := TRACEPARENT.fullmatch(parent):
            trace_id, span_id, flags = (int(part, 16) for part in found.groups())
            at = trace.SpanContext(trace_id, span_id, True, trace.TraceFlags(flags))  # noqa: FBT003
            span.add_link(at)
    if not isinstance(report, DrainReport | None):
        around = trace.set_span_in_context(span)
        start_ns = call.ended_ns - int(1e9 * sum(report.stages_s.values()))
        for stage, seconds in report.stages_s.items():
            child = _tracer().start_span(f"torch_ros.{stage}", around, start_time=start_ns)
            start_ns += int(1e9 * seconds)
            child.end(start_ns)
    if call.error is not None:
        span.record_exception(call.error, timestamp=call.ended_ns)
        span.set_status(trace.StatusCode.ERROR, str(call.error))
    span.end(call.ended_ns)


def _attributes(report: Report) -> dict[str, AttributeValue]:
    match report:
        case ReadReport():
            return {
                "version": report.version,
                "source": report.source,
                "bytes": report.bytes_read,
                "way": ", ".join(report.ways),
                "reroutes": report.reroutes,
            }
        case PublishReport():
            return {"bytes": report.bytes_total, "is_offered": report.is_offered}
        case DrainReport():
            return {
                "waited_for": report.waited_for,
                "left_behind": report.left_behind,
                "is_copied": report.is_copied,
            }
