"""One source, 1 to 8 readers at once, with and without relays, in processes of one host.

For each number of readers: the time of the last one, how often the trainer's memory was read, and
the CPU time of all processes, per GiB that was delivered. Prints a row of JSON per result.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
import uuid
from multiprocessing.synchronize import Barrier

import torch

import torch_ros


def cpu_s() -> float:
    used = os.times()
    return used.user + used.system


def read(
    model: str,
    endpoint: str,
    name: str,
    relay: bool,
    shape: tuple[int, int],
    rounds: int,
    start: Barrier,
    results: "multiprocessing.Queue[tuple[int, float, float, str]]",
) -> None:
    torch.set_num_threads(1)
    tensors = {f"w{i:04d}": torch.zeros(shape[1]) for i in range(shape[0])}
    with torch_ros.open(model, endpoint=endpoint, replica=name, relay=relay) as handle:
        handle.register(tensors)
        for number in range(rounds):
            start.wait()
            began_s, used_s = time.perf_counter(), cpu_s()
            handle.replicate(number)
            took_s, used_s = time.perf_counter() - began_s, cpu_s() - used_s
            assert tensors["w0000"][0].item() == number
            report = handle.last_read
            assert report is not None
            results.put((number, took_s, used_s, report.source))
            start.wait()
            handle.unpublish()
        start.wait()


def measure(readers: int, *, relay: bool, options: argparse.Namespace) -> dict[str, object]:
    context = multiprocessing.get_context("spawn")
    model, elements = f"fanout-{uuid.uuid4().hex[:8]}", (options.mib << 18) // options.tensors
    start, results = context.Barrier(readers + 1), context.Queue()
    rounds = options.rounds + 1
    children = [
        context.Process(
            target=read,
            args=(
                model,
                options.endpoint,
                f"reader{i}",
                relay,
                (options.tensors, elements),
                rounds,
                start,
                results,
            ),
        )
        for i in range(readers)
    ]
    for child in children:
        child.start()
    torch.set_num_threads(1)
    tensors = {f"w{i:04d}": torch.zeros(elements) for i in range(options.tensors)}
    last_s, cpu_per_gib_s, from_trainer = [], [], []
    with torch_ros.open(model, endpoint=options.endpoint, replica="trainer") as trainer:
        trainer.register(tensors)
        for number in range(rounds):
            for tensor in tensors.values():
                tensor.fill_(number)
            trainer.publish(number)
            used_s = cpu_s()
            start.wait()
            rows = [results.get(timeout=120) for _ in range(readers)]
            used_s = cpu_s() - used_s + sum(row[2] for row in rows)
            start.wait()
            trainer.unpublish()
            if number:  # the first one warms up
                last_s.append(max(row[1] for row in rows))
                cpu_per_gib_s.append(used_s / (readers * options.mib / 1024))
                from_trainer.append(sum(row[3] == "trainer" for row in rows))
        start.wait()
    for child in children:
        child.join(30)
    return {
        "case": "fanout",
        "readers": readers,
        "relay": relay,
        "mib": options.mib,
        "last_reader_s": statistics.median(last_s),
        "cpu_s_per_gib": statistics.median(cpu_per_gib_s),
        "read_from_trainer": statistics.median(from_trainer),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="local")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    for readers in options.readers:
        for relay in (True, False):
            print(json.dumps(measure(readers, relay=relay, options=options)), flush=True)


if __name__ == "__main__":
    main()
