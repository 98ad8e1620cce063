"""Over TCP, where nothing faster connects two processes, beside a bare socket."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensors as contents
from harness import Actors, Child, Sample, Setup, rounds, started
from others import RawReader, RawSource, Socket, TlsSocket
from ours import Rollout, Trainer
from report import Report, Row, ratio, speeds

from torch_ros.channels import addresses

PART = "TCP over loopback"
TENSOR_COUNT = 100

SOCKET = "one socket, sendall and recv_into"
TLS = "one socket in TLS 1.3, sendall and recv_into"
RAW = "NIXL by hand, TCP alone"
ROS = "torch_ros, transport=ucx-tcp"
OWN = "torch_ros, transport=tcp, plain as within a host"
SEALED = "torch_ros, transport=tcp, encrypted as between hosts"
HANDLES = {ROS: "ucx", OWN: "plain", SEALED: "sealed"}  # the actors of each


@contextmanager
def _nothing_copied(*, is_elsewhere: bool) -> Iterator[None]:
    """Processes that open a handle with transport=tcp copy nothing, or are in no common network."""
    place, before = addresses.place, os.environ.get("UCX_TLS")
    host, network = place()
    networks = itertools.count(1000 * os.getpid())
    os.environ["UCX_TLS"] = "tcp,self"
    addresses.place = lambda: (host, next(networks) if is_elsewhere else network)
    try:
        yield
    finally:
        addresses.place = place
        del os.environ["UCX_TLS"]
        if before is not None:
            os.environ["UCX_TLS"] = before


def _handles(make: partial[Trainer] | partial[Rollout]) -> Actors:
    actors: dict[str, Trainer | Rollout] = {"ucx": make("tcp", transport="ucx-tcp")}
    for name in ("plain", "sealed"):
        with _nothing_copied(is_elsewhere=name == "sealed"):
            actors[name] = make(name, transport="tcp", listen="127.0.0.1")
    return actors


def source(setup: Setup) -> Actors:
    held = contents.plain(setup.size_bytes, TENSOR_COUNT)
    return {
        **_handles(partial(_trainer, setup, held)),
        "raw": RawSource("tcp source", held, tcp_only=True),
        "socket": Socket(held),
        "tls": TlsSocket(held),
    }


def reader(setup: Setup) -> Actors:
    held = contents.plain(setup.size_bytes, TENSOR_COUNT)
    return {
        **_handles(partial(_rollout, setup, held)),
        "raw": RawReader("tcp reader", held, tcp_only=True),
        "socket": Socket(held),
        "tls": TlsSocket(held),
    }


def _trainer(setup: Setup, held: contents.Tensors, model: str, **options: Any) -> Trainer:
    return Trainer(setup, model, held, **options)


def _rollout(setup: Setup, held: contents.Tensors, model: str, **options: Any) -> Rollout:
    return Rollout(setup, model, "rollout", held, **options)


def measure(setup: Setup, report: Report) -> None:
    builds = {"source": partial(source, setup), "reader": partial(reader, setup)}
    with started(builds) as (trainer, rollout):
        rollout.ask("raw", "connect", *trainer.ask("raw", "offer"))
        for each in ("socket", "tls"):
            rollout.tell(each, "connect", (trainer.ask(each, "listen"),))
            trainer.ask(each, "accept")
            rollout.hear()
        cases = {case: partial(_once, case, trainer, rollout) for case in MOVES}
        samples = rounds(setup.repeat, cases)
        size_bytes = trainer.ask("ucx", "size_bytes")
    found = {
        case: speeds(size_bytes, [sample["elapsed_s"] for sample in taken])
        for case, taken in samples.items()
    }
    for case in (SOCKET, TLS, RAW, ROS, OWN, SEALED):
        bases = {"of the socket": SOCKET} if case != SOCKET else {}
        bases |= {"of NIXL by hand": RAW} if case in HANDLES else {}
        bases |= {"of ucx-tcp": ROS} if case in {OWN, SEALED} else {}
        bases |= {"of TLS": TLS} if case == SEALED else {}
        report.add(
            Row(
                part=PART,
                what=case,
                params={"MiB": setup.size_mib, "tensors": TENSOR_COUNT},
                unit="GB/s",
                samples=found[case],
                ratios={name: ratio(found[case], found[base]) for name, base in bases.items()},
            )
        )
    report.expect("TCP, plain, of ucx-tcp", ratio(found[OWN], found[ROS]), at_least=1.0)
    report.expect("TCP, plain, of a socket", ratio(found[OWN], found[SOCKET]), at_least=0.95)
    report.expect("TCP, encrypted, of TLS", ratio(found[SEALED], found[TLS]), at_least=0.9)


def _once(case: str, trainer: Child, rollout: Child) -> Sample:
    actor = HANDLES.get(case, "ucx")
    version = trainer.ask(actor, "write")
    elapsed_s = MOVES[case](trainer, rollout, version)
    rollout.ask(actor, "verify", version)
    rollout.ask(actor, "let_go")
    trainer.ask(actor, "unpublish")  # all handles have the same tensors
    return {"elapsed_s": elapsed_s}


def _by_socket(actor: str, trainer: Child, rollout: Child, _: int) -> float:
    rollout.tell(actor, "receive", ())
    trainer.ask(actor, "send")
    return rollout.hear()


def _by_hand(trainer: Child, rollout: Child, _: int) -> float:
    trainer.ask("raw", "begin")
    elapsed_s = rollout.ask("raw", "read")
    trainer.ask("raw", "end")
    return elapsed_s


def _by_ros(actor: str, trainer: Child, rollout: Child, version: int) -> float:
    trainer.ask(actor, "publish")
    return rollout.ask(actor, "replicate", version)["elapsed_s"]


MOVES = {SOCKET: partial(_by_socket, "socket"), TLS: partial(_by_socket, "tls"), RAW: _by_hand}
MOVES |= {case: partial(_by_ros, actor) for case, actor in HANDLES.items()}
