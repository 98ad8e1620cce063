"""An engine that is killed and started again and again never answers by anything but a version."""

import os
import signal
import threading
import time
import urllib.error
from contextlib import suppress
from http.client import HTTPException

import pytest
from demos import descendants
from kit import until
from rollouts import ServerUnderTest, at_birth, replica
from trainer import PROMPTS

import torch_ros

NAME = "born-again"
LIVES, ANSWERS, CLIENTS, TOKENS = 10, 10_000, 4, 3
LIFE_S = 600  # for the answers of one life


class Client(threading.Thread):
    """Asks all the time, also while nobody is there, and keeps each answer and each refusal."""

    def __init__(self, first):
        super().__init__(daemon=True)
        self.server, self.is_done, self._next = None, threading.Event(), first
        self.answers, self.refusals = [], []

    def run(self):
        while not self.is_done.is_set():
            number = self._next = (self._next + 1) % len(PROMPTS)
            params = {"temperature": 0, "max_tokens": TOKENS, "detokenize": False}
            body = {"model": "m", "token_ids": PROMPTS[number], "sampling_params": params}
            try:
                answer = self.server.ask("inference/v1/generate", body)
            except urllib.error.HTTPError as error:
                self.refusals.append(error.code)
            except (OSError, ValueError, HTTPException):  # killed in the middle, or not up
                time.sleep(0.01)
            else:
                choice = answer["choices"][0]
                labels = [span["version"] for span in choice["weight_versions"]]
                self.answers.append((number, choice["token_ids"], labels, choice["finish_reason"]))


def kill(server):
    for pid in [server._process.pid, *descendants(server._process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server._process.wait(60)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_answer_is_of_dummy_or_mixed_weights(place, tiny, train, etcd_endpoint, tmp_path):
    trainer, expected = train(tiny("untied"), NAME, digests="full"), {}

    def publish():
        version = len(expected) + 1
        expected[str(version)] = trainer.publish(version)["answers"]
        return version

    def start(life):
        server = ServerUnderTest(
            place("untied"), tmp_path / f"log{life}", **at_birth(NAME, **replica(etcd_endpoint))
        )
        for client in clients:
            client.server = server
        return server

    def has_come():
        """Whether there is an engine that was not there before."""
        found = watching.fleet().replicas.get("vllm")
        is_new = found is not None and found.inst not in known
        known.update({found.inst} if found else ())
        return is_new

    def count():
        return sum(len(client.answers) for client in clients)

    clients, waited_s, known = [Client(first) for first in range(CLIENTS)], [], set()
    watching = torch_ros.open(NAME, endpoint=etcd_endpoint, spot=True)
    server = start("first")  # before there is a version
    try:
        for client in clients:
            client.start()
        until(server.is_up, 300)
        server.update(publish(), pause="wait")
        for life in range(LIVES):
            goal = (life + 1) * ANSWERS // LIVES
            until(lambda goal=goal, life=life: count() > goal - ANSWERS // LIVES // 2, LIFE_S)
            server.update(publish(), pause="wait")  # in the middle
            until(lambda goal=goal: count() > goal, LIFE_S)
            if life % 2:
                publish()  # it missed that one
            has_come()
            kill(server)
            server, began_s = start(life), time.monotonic()
            if life % 3 == 2:
                until(has_come, 300)  # it reads its version, or will in a moment
                kill(server)
                server, began_s = start(f"{life}b"), time.monotonic()
            until(server.is_up, 300)
            waited_s.append(time.monotonic() - began_s)
            newest = {"weight_version": str(len(expected))}
            assert server.ask("weight_info", method="GET") == newest
    finally:
        for client in clients:
            client.is_done.set()
        kill(server)
        watching.close()
    judge(clients, expected)
    codes = sorted({code for client in clients for code in client.refusals})
    print(
        f"{count()} answers; refused with {codes}; up again after {min(waited_s):.0f} to "
        f"{max(waited_s):.0f} s"
    )
    assert codes == [503]


def judge(clients, expected):
    seen = set()
    for client in clients:
        for number, tokens, labels, reason in client.answers:
            if reason not in {"length", "stop"}:  # ended by the kill
                continue
            [label] = labels
            seen.add(label)
            assert tokens == expected[label][number][0][: len(tokens)], (label, number)
    assert len(seen) >= LIVES
