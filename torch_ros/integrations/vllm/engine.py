"""The engine behind vLLM's backend `torch_ros`: one in each worker, with a handle of its own."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

import torch
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import torch_ros
from torch_ros import arguments
from torch_ros.errors import NotSupported, UsageError
from torch_ros.integrations.from_bucket import BucketVersions
from torch_ros.integrations.installation import (
    Direct,
    Installer,
    InstallOptions,
    InstallReport,
    OnFailure,
)
from torch_ros.integrations.vllm import core
from torch_ros.integrations.vllm.draft import Draft, DraftModel, vet
from torch_ros.integrations.vllm.model import VLLMModel
from torch_ros.integrations.vllm.offline import ENGINES_ONLY
from torch_ros.integrations.vllm.told import tell
from torch_ros.printable import log_of

log: logging.Logger = log_of("vllm.torch_ros")  # vLLM configures its own loggers only

T = TypeVar("T")
BORN = "_torch_ros_born"  # an attribute of a model: the engine that its loader has begun with
INHERITED = (  # attributes that vLLM's own engine takes over from that one
    *("_installer", "_weights", "_timeout_s", "_options"),
    *("_has_bucket", "_who", "_born_with", "lack"),
)
OURS = ("model", "replica", "rank", "world_size", "installs")  # never among the options


@dataclass
class ROSInitInfo(WeightTransferInitInfo):
    """How an engine follows a model: the `init_info` of vLLM's calls, as JSON if need be.

    Attributes:
        replica: The name of this engine, needed if it has several workers or data parallelism: the
            engines of a data parallel group are replicas NAME-dp0, NAME-dp1 and on.
        bucket: As for `attach`. The engine has no name then, offers nothing to others, and nobody
            is told which version it uses.
        draft: Of an engine with a draft model, which is refused without it. "follow": its MTP
            layers come with each version, before the engine's own, through a handle of their own,
            NAME-draft; "keep": it stays as it is.
        draft_model: The name under which versions of a draft are published that is no MTP layer:
            with "follow", each update brings the latest of these first.
        timeout_s: For `init_weight_transfer_engine`, and for each update that names none.

    The rest is as for `attach`, or in `InstallOptions`.
    """

    model: str
    replica: str | None = None
    bucket: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    buffer_bytes: int = 256 << 20
    direct: Direct = "auto"
    relay: bool = True
    on_failure: OnFailure = "reread"
    cast: bool = True
    ignore: list[str] = field(default_factory=list)
    draft: Draft | None = None
    draft_model: str | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise UsageError(f"options={self.options!r}: expected a mapping of options of `open`")
        if taken := [name for name in OURS if name in self.options]:
            raise UsageError(
                f"options: {', '.join(taken)}: not there; the engine passes them itself"
            )
        if self.bucket is not None and (self.replica is not None or self.options):
            raise UsageError(
                f"bucket={self.bucket!r} with replica={self.replica!r} and options={self.options}: "
                "expected none of these, which are of a replica; an engine of a bucket is none"
            )
        arguments.optional(arguments.one_of(get_args(Draft)))("draft", self.draft)
        arguments.optional(arguments.text)("draft_model", self.draft_model)
        self.install_options()

    def install_options(self) -> InstallOptions:
        relay = self.relay if self.bucket is None else False
        return InstallOptions(
            self.buffer_bytes, self.direct, relay, self.on_failure, self.cast, self.ignore
        )


@dataclass
class ROSUpdateInfo(WeightTransferUpdateInfo):
    """A version to bring in: the `update_info` of vLLM's calls."""

    version: int | str = "latest"
    timeout_s: float | None = None


class Ranks:
    """The workers of one engine."""

    def __init__(self, parallel_config: Any) -> None:
        has_dp = parallel_config.data_parallel_size > 1
        self._group = get_tp_group() if has_dp else get_world_group()
        self.rank, self.size = self._group.rank_in_group, self._group.world_size
        if self.size != parallel_config.world_size:
            raise NotSupported(
                f"torch_ros with {parallel_config.world_size} workers per engine and "
                f"data_parallel_size={parallel_config.data_parallel_size}",
                "use tensor parallelism only beside data parallelism",
            )

    def gather(self, mine: T) -> Sequence[T]:
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, mine, group=self._group.cpu_group)
        return found


class ROSWeightTransferEngine(WeightTransferEngine[ROSInitInfo, ROSUpdateInfo]):
    """Follows a model whose versions are in torch_ros.

    `update_weights` does all the work: it reads in place, has vLLM load what cannot be, offers the
    parameters to others if all of a version lies in them, and acknowledges. If it fails, vLLM gives
    up the session. With several workers the driver has to end that, by a `finish_weight_update`,
    which fails: vLLM reads the answers of its workers up to the first that failed, and takes the
    others for those to its next call, so only the last worker raises.

    The driver pauses generation meanwhile: **between the first byte and the last, weights are of
    two versions**.
    """

    init_info_cls = ROSInitInfo
    update_info_cls = ROSUpdateInfo
    supports_draft_weight_update = False
    model_kind: type[VLLMModel] = VLLMModel

    def __init__(self, *args: Any) -> None:
        core.watch()  # it may lie in this very process, and have been loaded after the plug-in
        super().__init__(*args)
        self.draft: torch.nn.Module | None = None
        """The draft model of this worker; `core.show_draft` tells."""
        self._installer: Installer | None = None
        self._drafts: Installer | None = None
        self._timeout_s, self._options, self._has_bucket = 300.0, dict[str, Any](), False
        self._weights: VLLMModel | None = None
        self._who = ""  # for people
        self._is_updated = False  # in this session
        self._born_with: ROSInitInfo | None = None  # while it follows that
        self.lack: str = ""
        """The reason why the engine was born without a version."""
        if (born := self.model.__dict__.pop(BORN, None)) is not None:
            self._adopt(born)

    @property
    def report(self) -> InstallReport | None:
        """How the last version got in."""
        return self._installer.report if self._installer else None

    @property
    def active(self) -> int | None:
        """The version that the engine has; None: none, or nobody knows."""
        return self._installer.active if self._installer else None

    @property
    def uid(self) -> str:
        """The uid of the content that it has, if it has a version."""
        return self._installer.uid if self._installer else ""

    @property
    def reading_options(self) -> dict[str, Any] | None:
        """The options of a handle that reads beside the engine's own; None: it follows no model.

        Raises: NotSupported: The engine knows a bucket alone.
        """
        if self._installer is None:
            return None
        if self._has_bucket:
            raise NotSupported("an adapter beside a bucket", "attach the engine to its etcd")
        return {name: one for name, one in self._options.items() if name not in ENGINES_ONLY}

    def _adopt(self, born: "ROSWeightTransferEngine") -> None:
        """Go on with what the engine has that vLLM's loader has begun with."""
        self.__dict__ |= {name: born.__dict__[name] for name in INHERITED}
        is_renamed = self.vllm_config.lora_config is not None  # adapters have done that to modules
        if is_renamed and self._installer is not None:
            self._installer.forget()

    def withdraw(self) -> None:
        """Offer the parameters to nobody: somebody else is about to write to them."""
        if self._installer is not None:
            self._installer.withdraw("somebody else has loaded its weights")

    # Infos

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        parse = super().parse_init_info
        return self._as_one(lambda: parse(init_dict))

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        parse = super().parse_update_info
        return self._as_one(lambda: parse(update_dict))

    # vLLM's calls

    def init_transfer_engine(self, init_info: Any) -> None:
        if init_info is None or not self._as_one(lambda: self._vet(init_info)):
            return
        if init_info == self._born_with and self._installer is not None:
            return
        self.shutdown()
        self._as_one(lambda: self._open(init_info))

    def start_weight_update(self) -> None:
        self._is_updated = False

    def receive_weights(self, update_info: Any) -> None:
        if update_info is not None and self._is_open():
            self._as_one(lambda: self._install(update_info))

    def finish_weight_update(self) -> None:
        """Nothing is left to do. vLLM never recovers from an error here."""

    def shutdown(self) -> None:
        if self._installer is not None:
            self._installer.handle.close()
            self._installer = None
            self.model.__dict__.pop("load_weights", None)
        self._born_with = None
        if self._drafts is not None:
            self._drafts.handle.close()
            self._drafts = None

    # Steps

    def _is_open(self) -> bool:
        """Whether all ranks can go on: they open now what could not be when they were born."""
        info = self._born_with
        if self._installer is not None or info is None:
            return True
        is_open = False

        def open_now() -> bool:
            self._open(info)
            return True

        try:
            is_open = bool(self._as_one(open_now))
        finally:
            if not is_open:
                self.shutdown()
                self._born_with = info
        return is_open

    def _open(self, info: ROSInitInfo) -> None:
        ranks = self._ranks
        known: dict[str, Any] = {
            "device": self.device,
            "proves": info.direct == "proven",
            "is_mapped_anew": self._sleeps,
            "is_dummy": self.vllm_config.load_config.load_format in core.EMPTY,
        }
        engine = self.model_kind(self.model, model_config=self.model_config, **known)
        self._weights = engine
        how = info.install_options()
        self._drafts = draft = self._draft_installer(info, ranks, known)
        if info.bucket is None:
            handle = self._handle(info, ranks)
            installer = Installer(handle, engine, how, ranks, teller=handle, draft=draft)
            self._who = handle.replica
        else:
            versions = BucketVersions(info.bucket, info.model, ranks.rank)
            installer = Installer(versions, engine, how, ranks, draft=draft)
            self._who = f"rank {ranks.rank} from {info.bucket}"
        self._installer, self._timeout_s = installer, info.timeout_s
        self._options, self._has_bucket = dict(info.options), info.bucket is not None

        def load_weights(weights: Any) -> Any:
            self.withdraw()
            return engine.load_weights(weights)

        self.model.__dict__["load_weights"] = load_weights

    def _draft_installer(
        self, info: ROSInitInfo, ranks: Ranks, known: Mapping[str, Any]
    ) -> Installer | None:
        if info.draft != "follow" or self.draft is None:
            return None
        config = self.vllm_config.speculative_config.draft_model_config
        is_part, name = info.draft_model is None, info.draft_model or info.model
        model = DraftModel(self.draft, self.model, is_part=is_part, model_config=config, **known)
        how = replace(
            info.install_options(), relay=False, on_failure="refuse"
        )  # it goes back with its engine
        if info.bucket is not None:
            return Installer(BucketVersions(info.bucket, name, ranks.rank), model, how, ranks)
        return Installer(self._handle(info, ranks, draft=name), model, how, ranks)

    def _handle(
        self, info: ROSInitInfo, ranks: Ranks, *, draft: str | None = None
    ) -> "torch_ros.ShardHandle":
        options = {"timeout_s": info.timeout_s, **info.options, "replica": info.replica}
        if self._is_data_parallel:
            options["replica"] = f"{info.replica}-dp{self.parallel_config.data_parallel_index}"
        place = {"rank": ranks.rank, "world_size": ranks.size}
        if draft is not None:
            replica = options["replica"] and f"{options['replica']}-draft"
            options |= {"replica": replica, "spot": True, "retain": ()}
        return torch_ros.open(draft or info.model, **options, **place, installs=draft is None)

    def _install(self, info: ROSUpdateInfo) -> None:
        if self._installer is None:
            raise UsageError("no model to follow: call init_weight_transfer_engine first")
        if self._is_updated:
            raise UsageError(
                "a second update in one session: call finish_weight_update, and start anew"
            )
        report = self._installer.install(info.version, info.timeout_s or self._timeout_s)
        log.info("%s: %s", self._who, report)
        if self._drafts is not None:
            log.info("%s, its draft: %s", self._who, self._drafts.report)
        self._is_updated = True

    def _vet(self, info: ROSInitInfo) -> bool:
        """Refuse what cannot be, before a handle that is there is closed."""
        parallel, ranks = self.parallel_config, self._ranks
        if info.draft == "follow" and len(set(ranks.gather(self.draft is None))) > 1:
            raise NotSupported('draft="follow" with pipeline parallelism', 'pass draft="keep"')
        vet(self, self.draft, info.draft, info.draft_model)
        if parallel.enable_eplb:
            raise NotSupported("torch_ros with EPLB, which moves experts", "set enable_eplb=False")
        is_named = info.replica is not None or info.bucket is not None
        if not is_named and (ranks.size > 1 or self._is_data_parallel):
            raise UsageError(
                f"replica={info.replica!r}: expected a name for this engine: its {ranks.size} "
                "workers, or the data parallel engines beside it, have none in common"
            )
        if getattr(self.vllm_config, "ec_transfer_config", None) is not None:
            raise NotSupported(
                "torch_ros with an EC connector, which keeps what encoders of older weights found",
                "start the engine without ec_transfer_config",
            )
        offload = getattr(self.vllm_config, "offload_config", None)
        if offload is not None and offload.prefetch.offload_group_size > 0:
            raise NotSupported(
                "torch_ros with prefetch offloading, which moves weights while peers read them",
                "start the engine without offload_group_size",
            )
        if self._sleeps and info.install_options().relay:
            raise NotSupported(
                "relay=True with sleep mode, which takes away the memory that peers read",
                "pass relay=False, or start the engine without enable_sleep_mode",
            )
        return True

    @property
    def _sleeps(self) -> bool:
        return bool(getattr(self.vllm_config.model_config, "enable_sleep_mode", False))

    @property
    def _is_data_parallel(self) -> bool:
        # The engines of a model without experts are told that they are alone: a size of 1. They
        # keep their index, and this field, which vLLM sets to the size that was asked for.
        parallel = self.parallel_config
        asked_for = getattr(parallel, "elastic_ep_max_dp_size", 1)  # not in every release
        return bool(max(parallel.data_parallel_size, asked_for) > 1)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self.parallel_config)

    def _as_one(self, step: Callable[[], T]) -> T | None:
        """A step of all ranks; None if one of them failed. The last rank, and no other, raises."""
        ranks, found = self._ranks, None
        failure: Exception | None = None
        try:
            found = step()
        except Exception as error:
            log.exception("a call of the weight transfer failed")
            failure = error
        has_lost = self._installer is not None and self._installer.has_lost
        has_any_lost = any(ranks.gather(failure is not None and has_lost))
        text = tell(failure, self.active, has_lost=has_any_lost) if failure else ""
        failures = [each for each in ranks.gather(text) if each]
        if failures and ranks.rank == ranks.size - 1:
            raise RuntimeError(failures[0])
        return None if failures else found
