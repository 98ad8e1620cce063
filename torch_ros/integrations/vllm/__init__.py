"""vLLM engines that follow a model: `torch_ros` as a backend of vLLM's weight transfer.

vLLM finds `register` by its entry point. An engine with
``weight_transfer_config={"backend": "torch_ros"}`` then takes versions through vLLM's own calls,
offline or over HTTP; `attach` makes them for an offline engine. Methods of vLLM's engine core are
wrapped, in `core`; `gate` is for vLLM's server. Knows vLLM; asks torch_ros by its public face only.
Nothing here is imported before vLLM, or `attach`, asks for it.
"""

from torch_ros.integrations.vllm import core
from torch_ros.integrations.vllm.core import BACKEND
from torch_ros.integrations.vllm.offline import Attached, attach

__all__ = ["Attached", "attach", "register"]


def register() -> None:
    """Make the backend known to vLLM. Called in each of its processes, perhaps more than once."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415  # vLLM is here
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )
    from vllm.model_executor.model_loader import (  # noqa: PLC0415
        _LOAD_FORMAT_TO_MODEL_LOADER,
        register_model_loader,
    )

    from torch_ros.integrations.vllm.born import ROSModelLoader  # noqa: PLC0415

    core.watch()
    engines = ("torch_ros.integrations.vllm.engine", "ROSWeightTransferEngine")
    trainers = ("torch_ros.integrations.vllm.trainer", "ROSTrainerWeightTransferEngine")
    for factory, home in (
        (WeightTransferEngineFactory, engines),
        (WeightTransferTrainerFactory, trainers),
    ):
        if BACKEND not in factory._registry:  # noqa: SLF001  # there is no other way to ask
            factory.register_engine(BACKEND, *home)
    if BACKEND not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(BACKEND)(ROSModelLoader)
