"""TRL: the weight transfer of its `AsyncGRPOTrainer`, to vLLM servers that read for themselves.

Imports nothing of TRL: its WeightTransferProtocol is structural.
"""

import http.client
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit

import torch

import torch_ros
from torch_ros.deadline import Deadline
from torch_ros.errors import DeadlineExceeded, PeerError, TorchRosError, UsageError
from torch_ros.integrations.gathered import GatheredCopy
from torch_ros.printable import log_of

log: logging.Logger = log_of(__name__)

POLL_S = 1.0  # between looks whether the servers are up: they take tens of seconds
ANSWER_MAX = 1000  # characters of a server's answer in an error

PauseMode = Literal["abort", "wait", "keep"]


class ROSWeightTransfer:
    """Pass it as `AsyncGRPOTrainer(weight_transfer=...)`, on all ranks alike.

    TRL uses that of its main process only. There each tensor that TRL gathers is copied as it
    comes, into memory that stays from step to step, and offered as a version; then the servers
    read it, all at once. Versions count from 1, in a run of their own.

    The servers are vLLM's, with `--weight-transfer-config '{"backend": "torch_ros"}'` and, in
    their environment, VLLM_SERVER_DEV_MODE=1. If one fails, `send_weights` raises, and all of them
    stay paused.

    Args:
        servers: Base URLs, such as "http://host:8000"; one may stand alone.
        model: The name under which versions are published.
        options: For `torch_ros.open` here.
        init_info: For the engines, such as {"options": {"endpoint": ...}}; each is told the model
            and a name of its own besides.
        device: Where the copies lie; None: on the trainer's device.
        pause_mode: What vLLM does with requests under way; with "keep" they go on afterwards, when
            vLLM has computed what they have anew.
        timeout_s: For each answer of a server.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        model: str,
        *,
        options: Mapping[str, Any] | None = None,
        init_info: Mapping[str, Any] | None = None,
        device: str | None = "cpu",
        pause_mode: PauseMode = "keep",
        timeout_s: float = 1800.0,
    ) -> None:
        self._servers = _Servers([servers] if isinstance(servers, str) else servers, timeout_s)
        self._model, self._options = model, {"run": "new", **(options or {})}
        self._init_info, self._device = dict(init_info or {}), device
        self._pause_mode = pause_mode
        self._opened: tuple[torch_ros.ShardHandle, GatheredCopy] | None = None
        self.version: int = 0
        """The newest version that was published; 0: none."""

    def init_weight_transfer(self) -> None:
        """Wait for the servers, open a handle, and tell each engine which model to read.

        Does nothing if that is done. `send_weights` does it where it is not.
        """
        self._copy()

    def _copy(self) -> GatheredCopy:
        if self._opened is None:
            self._servers.wait_until_up()
            # Alone, whatever process group there is: TRL's other ranks have no part in this.
            handle = torch_ros.open(self._model, rank=0, world_size=1, **self._options)
            try:
                infos = [
                    self._info(f"{handle.replica}-vllm-{k}") for k in range(len(self._servers))
                ]
                self._servers.ask("init_weight_transfer_engine", *infos)
            except BaseException:
                handle.close()
                raise
            self._opened, self.version = (handle, GatheredCopy(handle, self._device)), 0
        return self._opened[1]

    def _info(self, replica: str) -> dict[str, Any]:
        """The body that tells an engine whom to follow; the caller's own words win."""
        return {"init_info": {"model": self._model, "replica": replica, **self._init_info}}

    def pause(self) -> None:
        """Have the servers stop between two steps of theirs."""
        self._servers.ask(f"pause?mode={self._pause_mode}")

    def resume(self) -> None:
        """Have the servers go on."""
        self._servers.ask("resume")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the tensors of `iterator`; returns when every server has them.

        Raises:
            PeerError: A server refused, or is away; says which, and its answer.
            DeadlineExceeded: A server did not answer within `timeout_s`.
            As `ShardHandle.publish` does.
        """
        copy, begun_s = self._copy(), time.monotonic()
        version = self.version + 1
        size = copy.publish(version, iterator)
        self.version = version
        try:
            self._servers.ask("start_weight_update")
            self._servers.ask("update_weights", {"update_info": {"version": version}})
        except PeerError:
            with suppress(TorchRosError):  # servers that did not fail are not left halfway
                self._servers.ask("finish_weight_update")
            raise
        self._servers.ask("finish_weight_update", {"weight_version": str(version)})
        log.info("sent version %d, %d bytes, in %.3f s", version, size, time.monotonic() - begun_s)

    def destroy(self) -> None:
        """Close the handle. May be called again, and so may `init_weight_transfer`."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].close()


class _Servers:
    """vLLM's endpoints at several servers, which are asked at the same time."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        self._urls, self._timeout_s = [url.rstrip("/") for url in urls], timeout_s
        if not self._urls:
            raise UsageError("servers: found none, expected one such as 'http://host:8000'")
        for url in self._urls:
            if not _is_server(url):
                raise UsageError(f"server {url!r}: expected one such as 'http://host:8000'")

    def __len__(self) -> int:
        return len(self._urls)

    def wait_until_up(self) -> None:
        deadline = Deadline("wait for the vLLM servers", self._timeout_s)
        while True:
            try:
                return self.ask("health", method="GET")
            except PeerError as error:
                deadline.check(str(error))
                time.sleep(POLL_S)

    def ask(self, path: str, *bodies: Mapping[str, Any], method: str = "POST") -> None:
        """Have all servers do it; returns when they have.

        Args:
            bodies: One for each server, or one for all, or none.

        Raises: PeerError, DeadlineExceeded: Of the first server that failed; all have answered.
        """
        each = bodies if len(bodies) == len(self._urls) else (bodies or ({},)) * len(self._urls)
        asked = [
            _Asked(f"{url}/{path}", method, body, self._timeout_s)
            for url, body in zip(self._urls, each, strict=True)
        ]
        errors = [error for one in asked if (error := one.answer()) is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"also: {other}")
            raise errors[0]


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return False


class _Asked:
    """A request that is on its way to a server."""

    def __init__(self, url: str, method: str, body: Mapping[str, Any], timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        parts = urlsplit(url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        assert parts.hostname  # `_Servers` has looked
        self._connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=timeout_s)
        self._failure: Exception | None = None
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        headers = {"Content-Type": "application/json"}
        try:
            self._connection.request(method, path, json.dumps(body), headers)
        except (OSError, http.client.HTTPException) as error:
            self._failure = error

    def answer(self) -> TorchRosError | None:
        """Wait for it; returns why it failed, if it did."""
        try:
            if self._failure is not None:
                raise self._failure
            response = self._connection.getresponse()
            text = response.read().decode(errors="replace")[:ANSWER_MAX]
        except TimeoutError:
            return DeadlineExceeded(self._url, self._timeout_s, "the server has not answered")
        except (OSError, http.client.HTTPException) as error:
            return PeerError(f"{self._url} did not answer: {error!r}; look at the server's log")
        finally:
            self._connection.close()
        if response.status != http.client.OK:
            return PeerError(
                f"{self._url} answered {response.status} {response.reason}: {text}; the server's "
                "log has the reason, and the servers stay paused"
            )
        return None
