"""Errors of ours on their way through vLLM, which keeps the text of an error and drops its type."""

import json

from torch_ros import errors

MARK = "[torch_ros error: "


def tell(error: Exception, active: int | None) -> str:
    """The text of an error, by which `hear` makes it again.

    Args:
        active: The version that the engine has in spite of it.
    """
    name = type(error).__name__ if isinstance(error, errors.TorchRosError) else "TorchRosError"
    args = error.args if isinstance(error, errors.TorchRosError) else (f"{error!r}",)
    told = {"error": name, "args": list(args), "active": active}
    return f"{error} {MARK}{json.dumps(told, default=str)}]"


def hear(error: BaseException) -> tuple[errors.TorchRosError, int | None] | None:
    """The error of ours that vLLM has made this of, and the version that the engine has.

    None if it was none of ours.
    """
    _, mark, rest = str(error).partition(MARK)
    if not mark:
        return None
    told, _ = json.JSONDecoder().raw_decode(rest)
    kind = getattr(errors, told["error"])
    return kind(*told["args"]), told["active"]
