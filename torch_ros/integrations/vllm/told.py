"""Errors of ours on their way through vLLM, which keeps the text of an error and drops its type."""

import json
from typing import Any

from torch_ros import errors

MARK = "[torch_ros error: "


def tell(error: Exception, active: int | None, *, has_lost: bool = False) -> str:
    """The text of an error, by which `hear` makes it again.

    Args:
        active: The version that the engine has in spite of it.
        has_lost: Its weights are none that it ever had: a part of a version, perhaps.
    """
    name = type(error).__name__ if isinstance(error, errors.TorchRosError) else "TorchRosError"
    args = error.args if isinstance(error, errors.TorchRosError) else (f"{error!r}",)
    told = {"error": name, "args": list(args), "active": active, "has_lost": has_lost}
    return f"{error} {MARK}{json.dumps(told, default=str)}]"


def hear(error: BaseException) -> tuple[errors.TorchRosError, int | None] | None:
    """The error of ours that vLLM has made this of, and the version that the engine has.

    None if it was none of ours.
    """
    if (told := _told(error)) is None:
        return None
    kind = getattr(errors, told["error"])
    return kind(*told["args"]), told["active"]


def heard_of_weights(error: BaseException) -> bool:
    """Whether an error of ours says that the weights are none that the engine ever had."""
    told = _told(error)
    return told is not None and told["has_lost"]


def _told(error: BaseException) -> Any:
    _, mark, rest = str(error).partition(MARK)
    return json.JSONDecoder().raw_decode(rest)[0] if mark else None
