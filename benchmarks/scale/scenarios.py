"""Scenarios: something happens to replicas, by parameters and a seed.

A scenario returns figures, rounded, which are the same for the same seed. The unit `x` is the time
in which a NIC carries a version.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from cluster import Cluster, Model, Process

from torch_ros.errors import TorchRosError

Figures = dict[str, Any]

PAPER = Model()
FIG_7B = replace(PAPER, nic=50e9 / 2.2)
FIG_11 = replace(PAPER, bytes_total=34e9, nic=22e9)
FIG_12 = replace(PAPER, bytes_total=10e9, nic=22e9)
FAR_STREAM, FAR_LINK = 4e9, 10.3e9  # figure 12: the rate of one GPU by TCP, and of all
FAR = replace(PAPER, bytes_total=5e9)
ARRIVE_S = 0.001  # in which all of a burst come
EAST, WEST = "default", "west"


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Burst:
    """Replicas that replicate the latest version, which some have, each as soon as it comes.

    Args:
        heads: Replicas that have all of it when the others come.
    """

    def __init__(self, cluster: Cluster, newcomers: Sequence[Process], heads: int = 1) -> None:
        self.cluster, self.newcomers = cluster, newcomers
        clock = cluster.clock
        self.trainers = cluster.replica("trainer", ranks=newcomers[0].ranks)
        self.heads = [p for n in range(heads - 1) for p in cluster.replica(f"head{n}")]
        cluster.open([*self.trainers, *self.heads, *newcomers])
        for trainer in self.trainers:
            cluster.does(trainer, clock.now_s, lambda trainer=trainer: trainer.handle.publish(1))
        cluster.run()
        for head in self.heads:
            cluster.does(head, clock.now_s, lambda head=head: head.handle.replicate("latest"))
        cluster.run()
        self._start()

    def _start(self) -> None:
        self.cluster.start()
        self.sent_before = self.cluster.network.sent().copy()
        self.came_s: dict[Process, float] = {}
        self.ended_s: dict[Process, float] = {}
        self.errors: dict[Process, TorchRosError] = {}

    def run(self, over_s: float = ARRIVE_S) -> None:
        """All newcomers come within `over_s`; returns when each has the version or is dead."""
        rng, clock = self.cluster.rng, self.cluster.clock
        order = list(range(0, len(self.newcomers), self.newcomers[0].ranks))
        rng.shuffle(order)
        for first in order:
            at_s = clock.now_s + rng.random() * over_s
            for process in self.newcomers[first : first + self.newcomers[0].ranks]:
                self.cluster.does(process, at_s, lambda process=process: self.live(process))
        self.cluster.run()

    def next_version(self) -> None:
        """All give up what they have, and the trainer publishes the next one: at no time."""
        cluster = self.cluster
        cluster.etcd.is_free = True
        for process in self.newcomers:
            cluster.does(process, cluster.clock.now_s, process.handle.unpublish)
        cluster.run()
        for trainer in self.trainers:
            cluster.does(trainer, cluster.clock.now_s, partial(self._publishes_next, trainer))
        cluster.run()
        self._start()

    def _publishes_next(self, trainer: Process) -> None:
        version = trainer.handle.version
        assert version is not None
        trainer.handle.unpublish()
        trainer.handle.publish(version + 1)

    def live(self, process: Process) -> None:
        self.came_s[process] = self.cluster.clock.now_s
        try:
            process.handle.replicate("latest")
        except TorchRosError as error:
            self.errors[process] = error
        else:
            self.ended_s[process] = self.cluster.clock.now_s

    def stalls_x(self, among: Callable[[Process], bool] = lambda _: True) -> list[float]:
        x_s = self.cluster.model.bytes_total / self.cluster.model.nic
        return [(s - self.came_s[p]) / x_s for p, s in self.ended_s.items() if among(p)]

    def figures(self) -> Figures:
        cluster, stalls = self.cluster, self.stalls_x()
        began_s, last_s = min(self.came_s.values()), max(self.ended_s.values())
        x_s = cluster.model.bytes_total / cluster.model.nic
        attached_s = [
            p.first_read[0] - self.came_s[p] for p in self.newcomers if p.first_read is not None
        ]
        size, count = cluster.model.bytes_total, len(self.newcomers)
        sent = cluster.network.sent().copy()
        sent[: len(self.sent_before)] -= self.sent_before  # copies came later
        of_heads = [sum(sent[n.number] for n in p.nodes) for p in (*self.trainers, *self.heads)]
        asked = cluster.etcd.requests
        return {
            "failed": len(self.errors),
            "last_x": rounded((last_s - began_s) / x_s),
            "mean_x": rounded(fmean(stalls)),
            "median_x": rounded(quantile(stalls, 0.5)),
            "p99_x": rounded(quantile(stalls, 0.99)),
            "attached_ms": [rounded(1e3 * quantile(attached_s, q)) for q in (0.5, 1.0)],
            "heads_sent_x": rounded(sum(of_heads) / size / self.newcomers[0].ranks),
            "readers_max": max(n.readers_peak for n in cluster.network.nodes),
            "commits": rounded((asked["commits"] - asked["lost"]) / count),
            "lost": rounded(asked["lost"] / count),
            "reads": rounded(asked["reads"] / count),
            "KiB": rounded(cluster.etcd.bytes / 1024 / count),
            "commits_first": rounded(
                fmean(p.first_read[1] for p in self.newcomers if p.first_read)
            ),
        }


def newcomers(
    cluster: Cluster, count: int, ranks: int = 1, datacenter: str = EAST
) -> list[Process]:
    return [
        process
        for number in range(count)
        for process in cluster.replica(f"r{number}", ranks=ranks, datacenter=datacenter)
    ]


def burst(
    seed: int, *, n: int, heads: int = 1, over_s: float = ARRIVE_S, model: Model = PAPER
) -> Figures:
    """N newcomers at once, or spread over some seconds."""
    with Cluster(model, seed=seed) as cluster:
        all_ = Burst(cluster, newcomers(cluster, n), heads)
        all_.run(over_s)
        # A line of some hundred points says as much as one of a thousand.
        shares = [k / 100 for k in range(101)]
        stalls = all_.stalls_x()
        return {**all_.figures(), "stalls_x": [rounded(quantile(stalls, s)) for s in shares]}


def figure_7b(seed: int, *, groups: int) -> Figures:
    """Groups of 8 GPUs each update at once from one trainer."""
    with Cluster(FIG_7B, seed=seed) as cluster:
        all_ = Burst(cluster, newcomers(cluster, groups, ranks=8))
        all_.run()
        figures = all_.figures()
        return {**figures, "stall_s": rounded(8 * groups * figures["mean_x"] * 2.2)}


def figure_11(seed: int, *, rollouts: int, trainers: int) -> Figures:
    """Elastic rollouts join at once."""
    with Cluster(FIG_11, seed=seed) as cluster:
        all_ = Burst(cluster, newcomers(cluster, rollouts), trainers)
        all_.run()
        figures = all_.figures()
        x_s = FIG_11.bytes_total / FIG_11.nic
        return {**figures, "mean_s": rounded(figures["mean_x"] * x_s)}


def figure_12(seed: int) -> Figures:
    """Four replicas of two GPUs in another datacenter update at once."""
    with Cluster(FIG_12, seed=seed) as cluster:
        cluster.network.join(EAST, WEST, FAR_LINK, FAR_STREAM)
        all_ = Burst(cluster, newcomers(cluster, 4, ranks=2, datacenter=WEST))
        all_.run()
        x_s = FIG_12.bytes_total / FIG_12.nic
        return {
            **all_.figures(),
            "stall_s": rounded(sum(all_.stalls_x()) * x_s),
            "crossings": rounded(cluster.network.crossed(EAST, WEST) / 2 / FIG_12.bytes_total),
        }


def updates_12(seed: int, *, seeding: str, etcd: str = EAST, every_s: float = 5.0) -> Figures:
    """As figure 12, of replicas that have a version, and poll for the next one between steps."""
    with Cluster(replace(FIG_12, etcd_datacenter=etcd), seed=seed) as cluster:
        cluster.network.join(EAST, WEST, FAR_LINK, FAR_STREAM)
        far = newcomers(cluster, 4, ranks=2, datacenter=WEST)
        trainers = cluster.replica("trainer", ranks=2)
        clock, stalls, ended_s = cluster.clock, dict.fromkeys(far, 0.0), list[float]()
        cluster.open(trainers)
        cluster.open(far, seeding=seeding)

        def publish(version: int) -> None:
            for trainer in trainers:
                cluster.does(trainer, clock.now_s, partial(go_on, trainer, version))
            cluster.run()

        def go_on(trainer: Process, version: int) -> None:
            trainer.handle.unpublish()
            trainer.handle.publish(version)

        def follow(process: Process) -> None:
            while process.handle.version != 2:
                asked_s = clock.now_s
                process.handle.update()
                stalls[process] += clock.now_s - asked_s
                clock.sleep(every_s)
            ended_s.append(clock.now_s - every_s)

        publish(1)
        for process in far:
            cluster.does(process, clock.now_s, process.handle.replicate)
        cluster.run()
        crossed = cluster.network.crossed(EAST, WEST)
        cluster.start()
        publish(2)
        began_s = clock.now_s
        for first in range(0, len(far), 2):
            at_s = clock.now_s + cluster.rng.random() * every_s
            for process in far[first : first + 2]:
                cluster.does(process, at_s, partial(follow, process))
        cluster.run()
        crossings = (cluster.network.crossed(EAST, WEST) - crossed) / 2 / FIG_12.bytes_total
        return {
            "stall_s": rounded(sum(stalls.values())),
            "worst_s": rounded(max(stalls.values())),
            "last_s": rounded(max(ended_s) - began_s),
            "crossings": rounded(crossings),
        }


def datacenters(seed: int, *, n: int, far: int = 1, over_s: float = ARRIVE_S) -> Figures:
    """N newcomers in one or more far datacenters: how often the version comes to each."""
    with Cluster(FAR, seed=seed) as cluster:
        names = [f"far{number}" for number in range(far)]
        for name in names:
            cluster.network.join(EAST, name, FAR.nic)
        for number, name in enumerate(names):
            for other in names[:number]:
                cluster.network.join(other, name, FAR.nic)
        coming = [cluster.replica(f"r{k}", datacenter=names[k % far])[0] for k in range(n)]
        all_ = Burst(cluster, coming)
        all_.run(over_s)
        came = [
            sum(cluster.network.crossed(a, name) for a in (EAST, *names) if a != name)
            for name in names
        ]
        crossings = [rounded(each / FAR.bytes_total) for each in came]
        return {**all_.figures(), "crossings": max(crossings)}


def stragglers(seed: int, *, n: int, share: float = 0.01, to: float = 0.1) -> Figures:
    """Some replicas have a fraction of the rate: in a first version, and in the next one."""
    with Cluster(PAPER, seed=seed) as cluster:
        coming = newcomers(cluster, n)
        all_ = Burst(cluster, coming)
        slow = set(cluster.rng.sample(coming, max(1, int(n * share))))
        for process in coming:
            if process in slow:
                process.slow_down(to)
        figures = Figures()
        for name in ("healthy", "next"):
            all_.run()
            healthy = all_.stalls_x(lambda process: process not in slow)
            figures = {
                **all_.figures(),
                **figures,
                f"{name}_median_x": rounded(quantile(healthy, 0.5)),
                f"{name}_p99_x": rounded(quantile(healthy, 0.99)),
                f"{name}_last_x": rounded(max(healthy)),
            }
            all_.next_version()
        return figures


def deaths(seed: int, *, n: int, share: float = 0.02) -> Figures:
    """Some replicas die in the middle of a burst; their readers know 0.1 s later."""
    with Cluster(PAPER, seed=seed) as cluster:
        coming = newcomers(cluster, n)
        all_ = Burst(cluster, coming)
        x_s = PAPER.bytes_total / PAPER.nic
        for process in cluster.rng.sample(coming, max(1, int(n * share))):
            at_s = cluster.clock.now_s + (0.1 + 0.8 * cluster.rng.random()) * x_s
            cluster.clock.at(at_s, kill_if_reading, all_, process)
        all_.run()
        dead = sum(process.is_dead for process in coming)
        return {**all_.figures(), "died": dead}


def kill_if_reading(all_: Burst, process: Process) -> None:
    if process not in all_.ended_s:
        all_.cluster.kill(process)


def herd(seed: int, *, waiting: int, reading: int) -> Figures:
    """Some wait for `latest-1`, of which there is none yet, while others read."""
    with Cluster(replace(PAPER, bytes_total=25e9), seed=seed) as cluster:
        coming = newcomers(cluster, waiting + reading)
        all_ = Burst(cluster, coming)
        patient, readers = coming[:waiting], coming[waiting:]
        clock, done = cluster.clock, list[Process]()

        def wait_for(process: Process) -> None:
            process.handle.replicate("latest-1")
            done.append(process)

        for process in patient:
            at_s = clock.now_s + cluster.rng.random() * ARRIVE_S
            cluster.does(process, at_s, lambda process=process: wait_for(process))
        asked = dict[str, int]()

        def publish_next() -> None:
            """Count how often the patient ones asked in vain; then their version comes."""
            asked["reads"] = sum(process.requests["reads"] for process in patient)
            asked["bytes"] = sum(process.bytes for process in patient)
            trainer = all_.trainers[0].handle
            trainer.unpublish()
            trainer.publish(2)

        for process in readers:
            at_s = clock.now_s + 0.5 + 0.5 * cluster.rng.random()
            cluster.does(process, at_s, lambda process=process: all_.live(process))
        cluster.does(all_.trainers[0], clock.now_s + 8.0, publish_next)
        cluster.run()
        return {
            "failed": waiting - len(done),
            "reads": rounded(asked["reads"] / waiting),
            "KiB": rounded(asked["bytes"] / 1024 / waiting),
        }


def held_up(seed: int) -> Figures:
    """The trainer unpublishes while only a far replica reads from it."""
    model = replace(PAPER, bytes_total=10e9)
    with Cluster(model, seed=seed) as cluster:
        cluster.network.join(EAST, WEST, FAR_STREAM)
        all_ = Burst(cluster, newcomers(cluster, 1, datacenter=WEST))
        trainer, clock, took = all_.trainers[0], cluster.clock, list[float]()
        began_s = clock.now_s

        def unpublish() -> None:
            trainer.handle.unpublish()
            took.append(clock.now_s - began_s - 1.0)

        cluster.does(trainer, began_s + 1.0, unpublish)
        all_.run()
        return {
            **all_.figures(),
            "unpublish_s": rounded(took[0]),
            "copy_s": rounded(model.bytes_total / model.copy + 3 * model.far_rtt_s),
        }


def fast_versions(seed: int, *, lasts_s: float = 60.0, far: int = 8) -> Figures:
    """A version comes each second and takes the link three; far rollouts poll, one all the time."""
    model = replace(PAPER, bytes_total=3e9, nic=25e9, ticks=1)
    with Cluster(model, seed=seed, step_bytes=model.bytes_total / 180) as cluster:
        cluster.network.join(EAST, WEST, 1e9)
        all_ = Burst(cluster, newcomers(cluster, far, datacenter=WEST))
        clock, began_s = cluster.clock, cluster.clock.now_s
        ends_s, newest, waits, lags, held = began_s + lasts_s, [1], list[float](), [0] * far, set()

        def train() -> None:
            handle = all_.trainers[0].handle
            while clock.now_s < ends_s:
                clock.sleep(1.0)
                before_s = clock.now_s
                handle.unpublish()
                waits.append(clock.now_s - before_s)
                newest[0] += 1
                handle.publish(newest[0])

        def follow(number: int, every_s: float) -> None:
            handle = all_.newcomers[number].handle
            while clock.now_s < ends_s:
                try:
                    if handle.version is None:
                        handle.replicate("latest")
                    else:
                        handle.update("latest")
                except TorchRosError:
                    clock.sleep(every_s)
                    continue
                held.add(handle.version)
                lags[number] = max(lags[number], newest[0] - (handle.version or 0))
                clock.sleep(every_s)

        cluster.does(all_.trainers[0], began_s, train)
        for number, process in enumerate(all_.newcomers):
            every_s = 0.02 if number == 0 else 1.0
            at_s = began_s + cluster.rng.random()
            cluster.does(process, at_s, lambda n=number, s=every_s: follow(n, s))
        cluster.run()
        crossed = cluster.network.crossed(EAST, WEST) / model.bytes_total
        return {
            "published": newest[0],
            "versions": len(held),
            "crossings": rounded(crossed / max(1, len(held))),
            "lag": max(lags),
            "held_up_s": rounded(max(waits)),
        }
