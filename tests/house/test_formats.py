"""A release that cannot read what another one writes says so by the number of the format."""

import importlib
import pkgutil
import re
from hashlib import blake2b

import msgspec
from msgspec.structs import NODEFAULT

from torch_ros.protocol.schema import SCHEMA

# A bucket's files have formats of their own.
FOLDERS = ("protocol", "weights", "codec", "p2p", "transfer", "features")
FORMATS = {3: "0e0a9d24f1c77da2", 4: "064be31b49e6a649", 5: "75d1b0f83baaafc9"}
"""The digest of all classes that processes write for each other, by the format's number.

A change of one of them takes a line with the next number, and `SCHEMA` is set to it. A number may
get another digest only while it is in no release and on no other machine: two builds with one
number read each other's records as garbage, and with two numbers each says which one it met.
"""


def classes():
    for folder in FOLDERS:
        package = importlib.import_module(f"torch_ros.{folder}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(info.name)
    waiting, found = [msgspec.Struct], {}
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        is_ours = one.__module__.split(".")[:1] == ["torch_ros"]
        if is_ours and one.__module__.split(".")[1] in FOLDERS and strict(one):
            found[one.__name__] = one
    return [found[name] for name in sorted(found)]


def strict(one):
    return one.__struct_config__.forbid_unknown_fields  # as all that comes from others is read


def described(one):
    config = one.__struct_config__
    rows = [f"{one.__name__} {config.array_like} {config.omit_defaults} {config.tag}"]
    for field in msgspec.structs.fields(one):
        default = "" if field.default is NODEFAULT else repr(field.default)
        rows.append(f"{field.encode_name}: {field.type} = {default}{field.required}")
    return re.sub(r"torch_ros\.[\w.]*\.", "", "\n".join(rows))  # a class may move


def digest():
    text = "\n\n".join(map(described, classes()))
    return blake2b(text.encode(), digest_size=8).hexdigest()


def test_a_record_that_changes_has_another_number():
    assert (SCHEMA, FORMATS.get(SCHEMA)) == (max(FORMATS), digest()), "add a line to FORMATS"
    assert len({*FORMATS.values()}) == len(FORMATS)


def test_each_change_of_a_class_is_seen():
    one = msgspec.defstruct("One", [("a", int), ("b", str, "")], forbid_unknown_fields=True)
    others = [
        msgspec.defstruct("One", [("a", int)]),
        msgspec.defstruct("One", [("a", int), ("c", str, "")]),
        msgspec.defstruct("One", [("a", int), ("b", bytes, "")]),
        msgspec.defstruct("One", [("a", int), ("b", str, "x")]),
        msgspec.defstruct("One", [("a", int), ("b", str, "")], array_like=True),
    ]
    assert len({described(each) for each in (one, *others)}) == 1 + len(others)
