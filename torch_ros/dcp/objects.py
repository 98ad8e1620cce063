"""The objects of a version, out of the bytes that a peer has sent: nothing is called but this list.

`torch.save` writes a zip file with a pickle and the bytes of tensors. torch's own weights_only
unpickler calls whatever any imported module has called safe: DeviceMesh, which waits for other
ranks, is among them. And neither it nor pickle limits what a small object may cost.
"""

from __future__ import annotations

import codecs
import io
import pickletools
import struct
import time
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.serialization import default_restore_location, get_safe_globals

BYTES_MAX = 4 << 30  # of all objects that a load reads; of one tensor in them
OPCODES_MAX = 10_000_000  # of all objects of a load: some 20 s, and at most 3 GiB
DEPTH_MAX = 100  # of containers in each other; DCP's own recursion ends before 300
EXPANDED_MAX = 10_000_000  # values, where one that comes several times counts as often
HASH_S, HASH_OPCODE_S = 2.0, 20e-6  # of the processor, for keys, and in addition for each opcode
LOOK = 256  # keys between two looks at the clock


class Refused(ValueError):
    """An object that is not taken from a peer; says why."""


class Spent:
    """The costs so far of the objects of one load."""

    def __init__(self) -> None:
        self.size_bytes = self.opcodes = self.keys = self.expanded = self.copied_bytes = 0
        self._began_s = time.thread_time()

    @property
    def expanded_max(self) -> int:
        return EXPANDED_MAX + self.opcodes

    def add_bytes(self, count: int) -> None:
        self.size_bytes += count
        if self.size_bytes > BYTES_MAX:
            raise Refused(f"it brings the objects of this load to {self.size_bytes} bytes")

    def add_opcode(self) -> None:
        self.opcodes += 1
        if self.opcodes > OPCODES_MAX:
            raise Refused(f"the objects of this load have more than {OPCODES_MAX} parts")

    def add_copy(self, given: Any) -> None:
        """Count an argument before the call, which may copy it, or look at all of it.

        A stream names one large argument again and again, for a few bytes each time.
        """
        if isinstance(given, torch.Tensor):
            self.copied_bytes += given.nbytes if given.layout == torch.strided else 0
        elif isinstance(given, str | bytes | bytearray):
            self.copied_bytes += len(given)
        elif isinstance(given, _CONTAINERS):
            self._expand(len(given), "is called with")
        if isinstance(given, tuple):
            for each in given:
                self.add_copy(each)
        if self.copied_bytes > BYTES_MAX:
            raise Refused(f"it is called with {self.copied_bytes} bytes in all")

    def add_key(self, values: int) -> None:
        """Count a key of so many values, before it is hashed."""
        self.keys += 1
        self._expand(values, "has keys of")
        # Keys can be chosen so that each is compared with all others.
        if self.keys % LOOK == 0:
            time_s = HASH_S + HASH_OPCODE_S * self.opcodes
            if time.thread_time() - self._began_s > time_s:
                raise Refused(f"its keys take more than {time_s:.0f} s")

    def _expand(self, values: int, what: str) -> None:
        self.expanded += values
        if self.expanded > self.expanded_max:
            raise Refused(f"it {what} more than {self.expanded_max} values in all")


def unpickled(content: bytes, spent: Spent) -> Any:
    """The value of an object that `torch.save` has written.

    Its tensors are where they were saved, or on the CPU if that device is not here.

    Raises:
        Refused: It takes more than plain values and tensors, or too much of the processor or the
            memory. Also other exceptions, whatever a hostile stream leads to.
    """
    value = _Unpickler(_Archive(content), spent).load()
    _require_small(value, spent.expanded_max)
    return value


class _Archive:
    """The records of a zip file, none of which is compressed: they lie in its bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        records = zipfile.ZipFile(io.BytesIO(content)).infolist()
        if any(each.compress_type != zipfile.ZIP_STORED for each in records):
            raise Refused("a record is compressed")
        if sum(each.file_size for each in records) > len(content):
            raise Refused("its records overlap")
        self._records = {each.filename.partition("/")[2]: each for each in records}
        if bytes(self.record("byteorder")) != b"little" and "byteorder" in self._records:
            raise Refused("it was written on a big-endian machine")

    def record(self, name: str) -> memoryview:
        """The bytes of the record of that name; none, if there is none."""
        if (found := self._records.get(name)) is None:
            return memoryview(b"")
        at = found.header_offset
        lengths = struct.unpack_from("<HH", self._content, at + 26)  # of its name, and extra field
        start = at + 30 + sum(lengths)
        return self._content[start : start + found.file_size]


class _Unpickler:
    """One pickle of protocol 2, as torch writes them."""

    def __init__(self, archive: _Archive, spent: Spent) -> None:
        self._archive, self._spent = archive, spent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, torch.storage.TypedStorage] = {}
        self._tuples: dict[int, tuple[int, int]] = {}  # of those that have some: values, depth
        self._users = _safe_of_users()  # may be named and called as well, by name

    def load(self) -> Any:
        for opcode, argument, _ in pickletools.genops(bytes(self._archive.record("data.pkl"))):
            self._spent.add_opcode()
            self._do(opcode.name, argument)
        [value] = self._stack
        return value

    def _do(self, name: str, argument: Any) -> None:  # noqa: C901  # a case for each opcode
        stack = self._stack
        match name:
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_SET":
                stack.append(_EMPTY[name]())
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._push_tuple(self._popped(_TUPLES[name]))
            case "TUPLE":
                self._push_tuple(self._marked())
            case "MARK":
                self._below.append(stack)
                self._stack = []
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "APPEND":
                self._extend(self._popped(1))
            case "APPENDS":
                self._extend(self._marked())
            case "SETITEM":
                self._set(self._popped(2))
            case "SETITEMS":
                self._set(self._marked())
            case _:
                self._call(name, argument)

    def _call(self, name: str, argument: Any) -> None:
        """The opcodes that find, call or fill something."""
        match name:
            case "GLOBAL":
                self._stack.append(self._found(argument))
            case "REDUCE":
                function, arguments = self._popped(2)
                self._stack.append(self._called(function, arguments))
            case "NEWOBJ":
                cls, arguments = self._popped(2)
                self._require_users(cls)
                self._spent.add_copy(arguments)  # a subclass of `str` copies its argument, too
                self._stack.append(cls.__new__(cls, *arguments))
            case "BUILD":
                [state] = self._popped(1)
                self._build(self._stack[-1], state)
            case "BINPERSID":
                [named] = self._popped(1)
                self._stack.append(self._storage(*named))
            case "PROTO" | "STOP":
                pass
            case _:
                raise Refused(f"it needs the opcode {name} of pickle")

    def _popped(self, count: int) -> list[Any]:  # off the top of the stack
        if len(self._stack) < count:
            raise Refused("its stack is empty")
        cut = len(self._stack) - count
        found, self._stack[cut:] = self._stack[cut:], []
        return found

    def _marked(self) -> list[Any]:
        found, self._stack = self._stack, self._below.pop()
        return found

    def _push_tuple(self, items: Sequence[Any]) -> None:
        """Push a tuple, unless its hash would take forever: it may name the same tuple often."""
        sizes = [self._size_of(each) for each in items]
        values = 1 + sum(size for size, _ in sizes)
        depth = 1 + max((depth for _, depth in sizes), default=0)
        if depth > DEPTH_MAX or values > self._spent.expanded_max:
            raise Refused(f"a tuple of {values} values in all, {depth} deep")
        made = tuple(items)
        self._tuples.pop(id(made), None)  # of one that is gone
        if depth > 1:
            self._tuples[id(made)] = values, depth
        self._stack.append(made)

    def _size_of(self, value: Any) -> tuple[int, int]:
        """The values that its hash would visit, and how deep they lie. Each tuple was pushed."""
        if type(value) is not tuple:
            return 1 + len(value) if type(value) is torch.Size else 1, 0
        return self._tuples.get(id(value), (1 + len(value), 1))

    def _key(self, value: Any) -> Any:
        self._spent.add_key(self._size_of(value)[0])
        return value

    def _extend(self, items: Sequence[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise Refused("it appends to what is no list")
        self._stack[-1].extend(items)

    def _set(self, items: Sequence[Any]) -> None:  # keys and values by turns
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict, Counter):
            raise Refused("it sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self._key(key)] = value

    def _found(self, argument: str) -> Any:
        """The value, class or function that a stream names as "module name"; only one of a list."""
        module, name = argument.split(" ", 1)
        if (module, name) in NAME_MAPPING:  # of Python 2, which protocol 2 is for
            module, name = NAME_MAPPING[module, name]
        name = f"{IMPORT_MAPPING.get(module, module)}.{name}"
        if name in _NAMED:
            return _NAMED[name]
        if name in self._users:
            return self._users[name]
        raise Refused(f"it needs {name}")

    def _called(self, function: Any, arguments: Any) -> Any:
        """Call a function that may be called, once the cost of its arguments is counted."""
        if type(arguments) is not tuple:
            raise Refused("it calls something with what is no tuple")
        self._spent.add_copy(arguments)
        if function is set:
            return self._set_of(*arguments)
        if function is _REBUILD_FROM_TYPE:  # which calls another one
            inner, kind, its_arguments, state = arguments
            made = self._called(inner, its_arguments)
            return _REBUILD_FROM_TYPE(lambda: made, kind, (), state)
        if function in _CALLED:
            return _CALLED[function](*arguments)
        self._require_users(function)
        return function(*arguments)

    def _set_of(self, items: Any = ()) -> set[Any]:
        if type(items) not in (list, tuple):
            raise Refused("it makes a set of what is no list")
        found = set()
        for each in items:
            found.add(self._key(each))
        return found

    def _require_users(self, function: Any) -> None:
        if not any(function is each for each in self._users.values()):
            raise Refused(f"it calls {function!r:.100}")

    def _build(self, target: Any, state: Any) -> None:
        """Fill an object as pickle does; of plain values, only an OrderedDict has attributes."""
        self._spent.add_copy(state)
        if type(target) is OrderedDict:
            target.__dict__.update(state)
            return
        self._require_users(type(target))
        if hasattr(target, "__setstate__"):
            target.__setstate__(state)
            return
        state, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        target.__dict__.update(state or {})
        for name, value in (slots or {}).items():
            setattr(target, name, value)

    def _storage(
        self, what: str, kind: Any, key: str, location: str, elements: int
    ) -> torch.storage.TypedStorage:
        if what != "storage" or kind not in _STORAGES:
            raise Refused(f"it names {what!r:.100}, which is no storage")
        if key not in self._storages:  # several tensors may be views of one
            dtype = _STORAGES[kind]
            storage = self._filled(key, location, elements * dtype.itemsize)
            self._storages[key] = _TYPED(wrap_storage=storage, dtype=dtype, _internal=True)
        return self._storages[key]

    def _filled(self, key: str, location: str, size_bytes: int) -> torch.UntypedStorage:
        if location == "meta":
            return _UNTYPED(size_bytes, device="meta")
        content = self._archive.record(f"data/{key}")
        if len(content) != size_bytes:
            raise Refused(f"a storage has {len(content)} bytes, of {size_bytes}")
        if not size_bytes:
            storage = _UNTYPED(0, device="cpu")
        else:
            storage = torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage()
        try:
            return _RESTORED(storage, location)
        except RuntimeError:  # on a device that is not there
            return storage


def _safe_of_users() -> Mapping[str, Any]:
    """All that programs have given to `add_safe_globals`, by the names that pickles use."""
    found = {}
    for each in get_safe_globals():
        value, name = each if isinstance(each, tuple) else (each, "")
        module = getattr(value, "__module__", "") or ""
        # `_NAMED` has torch's. Its own unpickler refuses the others, too, whoever calls them safe.
        if module.partition(".")[0] not in {"torch", "os", "posix", "sys", "nt"}:
            found[name or f"{module}.{value.__qualname__}"] = value
    return found


def _require_small(value: Any, expanded_max: int) -> None:
    """Refuse a value that is small in memory, and endless for DCP, which walks all through it."""
    sizes: dict[int, tuple[int, int]] = {}  # values and depth of each container, by id
    open_, todo = set[int](), [value]  # the containers around `here`; a stack: no recursion
    while todo:
        here = todo[-1]
        if id(here) in sizes or type(here) not in _CONTAINERS or not here:
            todo.pop()
        elif id(here) in open_:  # and all within it has been seen
            todo.pop()
            open_.discard(id(here))
            within = [sizes.get(id(each), (1, 0)) for each in _within(here)]
            values = 1 + sum(size for size, _ in within)
            depth = 1 + max((depth for _, depth in within), default=0)
            if depth > DEPTH_MAX or values > expanded_max:
                raise Refused(f"containers of {values} values in all, {depth} deep")
            sizes[id(here)] = values, depth
        else:
            open_.add(id(here))
            todo += [each for each in _within(here) if type(each) in _CONTAINERS]
            if any(id(each) in open_ for each in _within(here)):
                raise Refused("a container lies within itself")


def _within(container: Any) -> Iterator[Any]:
    yield from container
    if isinstance(container, dict):
        yield from container.values()


def _strided(rebuild: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Rebuilds a tensor if it lies within its storage: torch makes the storage larger instead."""

    def checked(
        storage: Any, offset: int, size: Sequence[int], stride: Sequence[int], *rest: Any
    ) -> torch.Tensor:
        dtypes = [each for each in rest if isinstance(each, torch.dtype)]  # of version 3
        item_bytes = (dtypes or [storage.dtype])[0].itemsize
        if any(type(each) is not int or each < 0 for each in (offset, *size, *stride)):
            raise Refused("a tensor of negative sizes")
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        reach = offset + last + 1 if prod(size) else offset  # the elements that it needs
        there_bytes = storage._untyped_storage.nbytes()  # noqa: SLF001  # the other one warns
        if reach * item_bytes > there_bytes or prod(size) * item_bytes > BYTES_MAX:
            raise Refused(f"a tensor of {list(size)} that its storage does not have")
        return rebuild(storage, offset, size, stride, *rest)

    return checked


def _sparse(layout: torch.layout, arguments: Sequence[Any]) -> torch.Tensor:
    """Rebuild a sparse tensor from what torch pickles: indices, values, size, is_coalesced; or,
    compressed, two kinds of indices, values, size. Torch checks the indices: one outside of the
    size would reach memory that is not the tensor's.
    """
    values = arguments[-3 if layout == torch.sparse_coo else -2]
    alike = {"dtype": values.dtype, "device": values.device, "check_invariants": True}
    if layout == torch.sparse_coo:
        indices, _, size, is_coalesced = arguments
        return _COO(indices, values, size, is_coalesced=is_coalesced, **alike)
    compressed, plain, _, size = arguments
    return _COMPRESSED(compressed, plain, values, size, layout=layout, **alike)


def _encoded(text: str, encoding: str) -> bytes:
    if encoding not in {"latin1", "latin-1"}:  # others take the square of the time
        raise Refused(f"it needs the encoding {encoding!r:.20}")
    return text.encode("latin1")


def _bytearray(*of: Any) -> bytearray:
    if len(of) == 2:
        return bytearray(_encoded(*of))
    if of and type(of[0]) is not bytes:  # a number is that many bytes
        raise Refused("it makes a bytearray of what is no bytes")
    return bytearray(*of)


def _empty(kind: Callable[[], Any]) -> Any:
    return kind()


def _counter(counts: Mapping[Any, int] | None = None) -> Counter[Any]:
    if type(counts) not in (dict, type(None)):
        raise Refused("it counts what is no dict")
    return Counter(counts)


_EMPTY: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONTAINERS = (list, tuple, dict, OrderedDict, Counter, set)
_COO: Callable[..., torch.Tensor] = torch.sparse_coo_tensor
_COMPRESSED: Callable[..., torch.Tensor] = torch.sparse_compressed_tensor
_TYPED: Callable[..., torch.storage.TypedStorage] = torch.storage.TypedStorage
_UNTYPED: Callable[..., torch.UntypedStorage] = torch.UntypedStorage
_RESTORED: Callable[[Any, str], torch.UntypedStorage] = default_restore_location
_WITH_STORAGE = {"tensor", "tensor_v2", "tensor_v3", "qtensor"}
_REBUILD_FROM_TYPE = torch._tensor._rebuild_from_type_v2  # noqa: SLF001
_LAYOUT = torch.serialization._get_layout  # noqa: SLF001
_REBUILDS: Mapping[str, Callable[..., Any]] = {
    name: getattr(torch._utils, f"_rebuild_{name}")  # noqa: SLF001
    for name in (
        *("tensor", "tensor_v2", "tensor_v3", "qtensor", "sparse_tensor"),
        *("parameter", "parameter_with_state", "meta_tensor_no_storage"),
    )
}
# The functions that may be called, beside `set` and the first of these.
_CALLED: Mapping[Any, Callable[..., Any]] = {
    **{each: each for each in (complex, torch.Size, torch.device, _LAYOUT, *_REBUILDS.values())},
    **{each: _strided(each) for name, each in _REBUILDS.items() if name in _WITH_STORAGE},
    _REBUILDS["sparse_tensor"]: _sparse,
    OrderedDict: partial(_empty, OrderedDict),
    Counter: _counter,
    bytes: partial(_empty, bytes),  # of a number they are that many
    bytearray: _bytearray,
    codecs.encode: _encoded,
}
_STORAGES: Mapping[type, torch.dtype] = {
    each: getattr(each, "_dtype", torch.uint8)
    for each in (*vars(torch).values(), torch.UntypedStorage)
    if isinstance(each, type)
    and issubclass(each, torch.storage._LegacyStorage | torch.UntypedStorage)  # noqa: SLF001
}
_VALUES = [each for each in vars(torch).values() if isinstance(each, torch.dtype | torch.qscheme)]
_NAMED: Mapping[str, Any] = {
    "_codecs.encode": codecs.encode,
    "torch.Tensor": torch.Tensor,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    **{str(each): each for each in _VALUES},
    **{
        f"{each.__module__}.{each.__qualname__}": each
        for each in (*_CALLED, *_STORAGES, set, torch.nn.Parameter, _REBUILD_FROM_TYPE)
    },
}
