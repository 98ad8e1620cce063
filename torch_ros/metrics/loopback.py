"""Names of hosts, for pages that are for this host alone."""

import ipaddress
import re


def is_loopback(host: str) -> bool:
    """Whether it is a name of this host that no other host has."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_and_port(header: str) -> tuple[str, str]:
    """Those that a browser was given, by its header "Host"; "" where none can be read."""
    named = re.fullmatch(r"(?:\[(.*)\]|([^:]*))(?::(\d+))?", header, re.ASCII)
    return (named[1] or named[2] or "", named[3] or "") if named else ("", "")
