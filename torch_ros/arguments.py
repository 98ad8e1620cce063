"""Checks of a caller's arguments: a wrong type is named here and not met further down."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_ros.errors import UsageError

FOREVER_S = 1e9  # thirty years; clocks and locks take no more

Check = Callable[[str, Any], object]
"""Takes a name and a value. Raises: UsageError: The value is refused; the error names both."""


def check(given: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Raises: UsageError: A value that `checks` names is refused."""
    for name, each in checks.items():
        each(name, given[name])


def text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} {value!r}: expected a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} {value!r}: expected text that UTF-8 can write") from error


def maybe_text(name: str, value: Any) -> None:
    """None and "" are two ways to say no."""
    if value not in (None, ""):
        text(name, value)


def texts(name: str, value: Any) -> None:
    """Refuses a single string, which would be taken letter by letter."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(f"{name}={value!r}: expected a list of strings, such as [{value!r}]")
    for each in value:
        text(f"{name}: name", each)


def yes_or_no(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r}: expected True or False")


def seconds(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= FOREVER_S:  # nan is not
        raise UsageError(f"{name}={value!r}: expected seconds, from 0 to {FOREVER_S:,.0f}")


def whole(least: int, most: int) -> Check:
    def within(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UsageError(
                f"{name}={value!r}: expected a whole number from {least:,} to {most:,}"
            )

    return within


def one_of(names: Sequence[str]) -> Check:
    def among(name: str, value: Any) -> None:
        if value not in names:
            raise UsageError(f"{name}={value!r}: expected one of {', '.join(names)}")

    return among


def instance(kind: type) -> Check:
    def of_that_kind(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise UsageError(f"{name}={value!r}: expected a {kind.__module__}.{kind.__name__}")

    return of_that_kind


def optional(inner: Check) -> Check:
    def none_or(name: str, value: Any) -> None:
        if value is not None:
            inner(name, value)

    return none_or
