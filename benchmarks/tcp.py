"""Over TCP, where nothing faster connects two processes, beside a bare socket."""

from functools import partial

import tensors as contents
from harness import Actors, Child, Sample, Setup, rounds, started
from others import RawReader, RawSource, Socket
from peers import Rollout, Trainer
from report import Report, Row, ratio, speeds

PART = "TCP over loopback"
TENSOR_COUNT = 100

SOCKET = "one socket, sendall and recv_into"
RAW = "NIXL by hand, TCP alone"
ROS = "torch_ros, transport=ucx-tcp"


def source(setup: Setup) -> Actors:
    held = contents.plain(setup.size_bytes, TENSOR_COUNT)
    return {
        "trainer": Trainer(setup, "tcp", held, transport="ucx-tcp"),
        "raw": RawSource("tcp source", held, tcp_only=True),
        "socket": Socket(held),
    }


def reader(setup: Setup) -> Actors:
    held = contents.plain(setup.size_bytes, TENSOR_COUNT)
    return {
        "rollout": Rollout(setup, "tcp", "rollout", held, transport="ucx-tcp"),
        "raw": RawReader("tcp reader", held, tcp_only=True),
        "socket": Socket(held),
    }


def measure(setup: Setup, report: Report) -> None:
    builds = {"source": partial(source, setup), "reader": partial(reader, setup)}
    with started(builds) as (trainer, rollout):
        rollout.ask("raw", "connect", *trainer.ask("raw", "offer"))
        rollout.ask("socket", "connect", trainer.ask("socket", "listen"))
        trainer.ask("socket", "accept")
        cases = {case: partial(_once, case, trainer, rollout) for case in MOVES}
        samples = rounds(setup.repeat, cases)
        size_bytes = trainer.ask("trainer", "size_bytes")
    found = {
        case: speeds(size_bytes, [sample["elapsed_s"] for sample in taken])
        for case, taken in samples.items()
    }
    for case in (SOCKET, RAW, ROS):
        bases = {"of the socket": SOCKET} if case != SOCKET else {}
        bases |= {"of NIXL by hand": RAW} if case == ROS else {}
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
    report.expect("TCP, of a socket", ratio(found[ROS], found[SOCKET]), at_least=0.8)


def _once(case: str, trainer: Child, rollout: Child) -> Sample:
    version = trainer.ask("trainer", "write")
    elapsed_s = MOVES[case](trainer, rollout, version)
    rollout.ask("rollout", "verify", version)
    rollout.ask("rollout", "let_go")
    return {"elapsed_s": elapsed_s}


def _by_socket(trainer: Child, rollout: Child, _: int) -> float:
    rollout.tell("socket", "receive", ())
    trainer.ask("socket", "send")
    return rollout.hear()


def _by_hand(trainer: Child, rollout: Child, _: int) -> float:
    trainer.ask("raw", "begin")
    elapsed_s = rollout.ask("raw", "read")
    trainer.ask("raw", "end")
    return elapsed_s


def _by_ros(trainer: Child, rollout: Child, version: int) -> float:
    trainer.ask("trainer", "publish")
    return rollout.ask("rollout", "replicate", version)["elapsed_s"]


MOVES = {SOCKET: _by_socket, RAW: _by_hand, ROS: _by_ros}
