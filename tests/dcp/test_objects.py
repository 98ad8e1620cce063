"""Objects of peers: what torch saves comes back, and nothing hangs, calls or eats a process."""

import enum
import io
import pickle
import random
import struct
import sys
import time
import warnings
import zipfile
from collections import Counter, OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor

from torch_ros.dcp import ROSReader, ROSWriter, objects
from torch_ros.dcp.objects import Refused, Spent, unpickled
from torch_ros.errors import UntrustedObject, reason


class Label(str):
    __slots__ = ()


class Colour(enum.Enum):
    RED = 1

    def __reduce_ex__(self, _):
        return Colour, (self.value,)  # as newer Pythons do: older ones take it by getattr


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def zipped(pickled, compression=zipfile.ZIP_STORED):
    """As torch.save writes it, with another pickle in it."""
    made, source = io.BytesIO(), zipfile.ZipFile(io.BytesIO(saved([torch.ones(1)])))
    with zipfile.ZipFile(made, "w", compression) as archive:
        for name in source.namelist():
            is_pickle = name.endswith("data.pkl")
            archive.writestr(name, pickled if is_pickle else source.read(name))
    return made.getvalue()


def text(string):
    return b"X" + struct.pack("<I", len(string)) + string.encode()


def called(name, *arguments):
    return b"c" + name.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


def long(number):
    content = pickle.encode_long(number)
    return b"\x8a" + bytes([len(content)]) + content


def of_storage(elements, *sizes):
    """A tensor of the one float that is there; of what else the arguments say."""
    kind = b"ctorch\nFloatStorage\n"
    storage = b"(" + text("storage") + kind + text("0") + text("cpu") + long(elements) + b"tQ"
    return called("torch._utils _rebuild_tensor_v2", storage, *sizes, b"\x89", b"N")


def dimension(number):
    return b"(" + long(number) + b"t"


def legitimate():
    tensor, parameter, base = torch.ones(3), torch.nn.Parameter(torch.ones(2)), torch.arange(10.0)
    tensor.mark, parameter.mark = 7, "x"
    ordered = OrderedDict(a=1)
    ordered._metadata = {"v": 2}
    return {
        "numbers": [3, -1, 2**70, -(2**40), 1.5, float("inf"), 1 + 2j, True, None, 2**31],
        "texts": ["", "é\ud800", b"abc\xff", b"", bytearray(b"xy")],
        "containers": [1, [2, (3, {"a": {1, 2}, (1, (2, 3)): ()})], {1.5: {(1, 2), "a"}}],
        "ordered": [ordered, OrderedDict(), Counter("hello"), Counter()],
        "torch's": [torch.Size([1, 2]), torch.bfloat16, torch.uint16, torch.device("cuda:0")],
        "random": [random.getstate(), (torch.get_rng_state(),)],
        "tensors": (torch.ones(3, 2), torch.tensor(3), torch.empty(0, 5), base[2:5], base[::2]),
        "dtypes": tuple(
            torch.ones(3).to(dtype)
            for dtype in (torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64)
        ),
        "more": (tensor, parameter, torch.ones(1).expand(1000), torch.ones(2) + 0j),
        "sparse": (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()),
        "meta": (torch.empty(3, 3, device="meta"),),
    }


@pytest.mark.parametrize("kind", legitimate())
def test_what_torch_saves_comes_back(kind):
    value = legitimate()[kind]
    found = unpickled(saved(value), Spent())
    assert repr(found) == repr(torch.load(io.BytesIO(saved(value)), weights_only=False))
    assert type(found) is type(value)
    if kind == "more":
        assert (found[0].mark, found[1].mark) == (7, "x")
    if kind == "ordered":
        assert found[0]._metadata == {"v": 2}
    if kind == "tensors":
        assert found[3].untyped_storage().data_ptr() == found[4].untyped_storage().data_ptr()


def test_classes_that_the_program_calls_safe_are_safe_except_those_of_torch():
    content = saved([Colour.RED])
    with pytest.raises(Refused, match=r"it needs .*Colour"):
        unpickled(content, Spent())
    with torch.serialization.safe_globals([Colour]):
        assert unpickled(content, Spent()) == [Colour.RED]
    with pytest.raises(Refused, match="DeviceMesh"):
        unpickled(zipped(b"\x80\x02ctorch.distributed.device_mesh\nDeviceMesh\n."), Spent())


BOMB = b"K\x00\x85" + b"q\x01h\x01\x86" * 64  # a tuple of which hash() visits 2**64
LISTS = b"]q\x01" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(1, 64))
HUGE = long(2**34)
HOSTILE = {
    "a key of 2**64 tuples": b"}" + BOMB + b"K\x01s",
    "that in a set": called("__builtin__ set", b"](" + BOMB + b"e"),
    "that as a function": BOMB + b")R",
    "a key that is deep": b"}" + b"K\x00" + b"\x85" * 10**6 + b"K\x01s",
    "a list that is deep": b"]" * 10**5 + b"a" * (10**5 - 1),
    "a list within itself": b"]q\x00h\x00a",
    "2**63 lists": LISTS,
    "zeros": called("__builtin__ bytearray", HUGE),
    "zeros, as bytes": called("__builtin__ bytes", HUGE),
    "a tensor by its class": called("torch Tensor", HUGE),
    "a storage by its class": called("torch FloatStorage", HUGE),
    "an untyped storage": called("torch.storage UntypedStorage", HUGE),
    "a parameter by its class": b"ctorch.nn.parameter\nParameter\n)\x81",
    "a tensor beyond its storage": of_storage(1, b"K\x00", dimension(2**33), dimension(1)),
    "a tensor behind its storage": of_storage(1, HUGE, dimension(1), dimension(1)),
    "a tensor of 2**60 zeros": of_storage(1, b"K\x00", dimension(2**60), dimension(0)),
    "a tensor before its storage": of_storage(1, long(-4), dimension(1), dimension(1)),
    "a storage that is not there": of_storage(2**33, b"K\x00", dimension(1), dimension(1)),
    "a slow encoding": called("_codecs encode", text("a" * 9), text("punycode")),
    "another way in": called(
        "torch._tensor _rebuild_from_type_v2", b"c__builtin__\nset\n", b"N" * 3
    ),
    "a call of a call": called(
        "torch._tensor _rebuild_from_type_v2", b"ctorch\nTensor\n", b"ctorch\nTensor\n", b")}"
    ),
    "code": called("os system", text("exit")),
    "code of Python 2": called("__builtin__ eval", text("1")),
    "an opcode": b"I1\n",
    "an opcode of classes": b"(c__builtin__\nset\no",
    "no end of it": b"X\xff\xff\xff\xff",
    "an empty stack": b"a",
    "no mark": b"t",
    "an unknown memo": b"h\x07",
    "no pickle": b"",
    "odd items": b"}(K\x01u",
    "an attribute of a list": b"](}b",
    "odd storage": b"K\x01Q",
}


@pytest.mark.parametrize("stream", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_hangs_calls_or_eats_a_process_is_refused_at_once(stream):
    began_s = time.thread_time()
    with pytest.raises(Exception) as caught:  # `vet` makes any of them ours
        unpickled(zipped(b"\x80\x02" + stream + b"."), Spent())
    assert not isinstance(caught.value, MemoryError | RecursionError)
    assert time.thread_time() - began_s < 5


def test_a_compressed_record_is_never_unpacked():
    with pytest.raises(Refused, match="compressed"):
        unpickled(zipped(b"\x80\x02N.", zipfile.ZIP_DEFLATED), Spent())


def test_a_place_in_the_memo_takes_no_memory():
    assert unpickled(zipped(b"\x80\x02]r\xff\xff\xff\x7f."), Spent()) == []


MODULUS = sys.hash_info.modulus
COLLIDING = {
    "numbers in a dict": b"}(%su" % b"".join(long(n * MODULUS) + b"N" for n in range(1, 20_000)),
    "numbers in a set": called(
        "__builtin__ set", b"](%se" % b"".join(long(n * MODULUS) for n in range(1, 20_000))
    ),
}


@pytest.mark.parametrize("stream", COLLIDING.values(), ids=COLLIDING.keys())
def test_keys_that_are_compared_with_all_others_are_given_up(stream, monkeypatch):
    monkeypatch.setattr(objects, "HASH_S", 0.01)
    monkeypatch.setattr(objects, "HASH_OPCODE_S", 0.0)
    with pytest.raises(Refused, match="its keys take more than"):
        unpickled(zipped(b"\x80\x02" + stream + b"."), Spent())


NUMBERS = b"".join(long(n) for n in range(20_000))
LARGE_TEXT = text("a" * (1 << 16)) + text("latin1") + b"\x86"  # arguments that say it
LARGE_DICT = b"}(%su" % NUMBERS
AGAIN = {  # a function, and its arguments, which are some 64 KiB
    "bytes": (b"c_codecs\nencode\n", LARGE_TEXT),
    "bytearrays": (b"c__builtin__\nbytearray\n", b"c_codecs\nencode\n" + LARGE_TEXT + b"R\x85"),
    "counters": (b"ccollections\nCounter\n", LARGE_DICT + b"\x85"),
    "sizes": (b"ctorch\nSize\n", b"(%st\x85" % NUMBERS),
}


@pytest.mark.parametrize("kind", AGAIN)
def test_what_is_copied_again_and_again_counts_each_time(kind, monkeypatch):
    monkeypatch.setattr(objects, "BYTES_MAX", 10 << 20)
    monkeypatch.setattr(objects, "EXPANDED_MAX", 1_000_000)
    function, arguments = AGAIN[kind]
    stream = b"](%sq\x01%sq\x02R%se" % (function, arguments, b"h\x01h\x02R" * 400)
    with pytest.raises(Refused, match="it is called with"):
        unpickled(zipped(b"\x80\x02" + stream + b"."), Spent())


def test_objects_that_copy_one_text_again_and_again_count_each_time(monkeypatch):
    monkeypatch.setattr(objects, "BYTES_MAX", 10 << 20)
    named = f"c{__name__}\nLabel\n".encode()
    stream = b"](%sq\x01%s\x85q\x02\x81%se" % (
        named,
        text("a" * (1 << 16)),
        b"h\x01h\x02\x81" * 400,
    )
    with (
        torch.serialization.safe_globals([Label]),
        pytest.raises(Refused, match="it is called with"),
    ):
        unpickled(zipped(b"\x80\x02" + stream + b"."), Spent())


def test_attributes_that_are_copied_again_and_again_count_each_time(monkeypatch):
    monkeypatch.setattr(objects, "EXPANDED_MAX", 1_000_000)
    named = b"}(%su" % b"".join(text(f"a{n}") + b"N" for n in range(10_000))
    ordered = b"ccollections\nOrderedDict\nq\x01)q\x02"
    stream = b"](%sq\x05%s%se" % (named, ordered, b"h\x01h\x02Rh\x05b" * 400)
    with pytest.raises(Refused, match="it is called with"):
        unpickled(zipped(b"\x80\x02" + stream + b"."), Spent())


def test_a_size_as_a_key_counts_as_often_as_it_is_hashed(monkeypatch):
    monkeypatch.setattr(objects, "EXPANDED_MAX", 1_000_000)
    size = called("torch Size", b"(%st" % NUMBERS)
    stream = b"%sq\x01}(%su" % (size, b"h\x01N" * 400)
    with pytest.raises(Refused, match="it has keys of"):
        unpickled(zipped(b"\x80\x02" + stream + b"."), Spent())


def test_the_objects_of_a_load_share_its_limits(monkeypatch):
    content = saved(list(range(900)))
    monkeypatch.setattr(objects, "OPCODES_MAX", 2000)
    costs = Spent()
    unpickled(content, costs)
    with pytest.raises(Refused, match="more than 2000 parts"):
        for _ in range(2):
            unpickled(content, costs)
    monkeypatch.setattr(objects, "BYTES_MAX", 100)
    with pytest.raises(Refused, match="to 101 bytes"):
        costs.add_bytes(101)
    with pytest.raises(Refused, match="called with 120 bytes"):  # as for a sparse tensor
        costs.add_copy((torch.sparse_coo, (torch.ones(30), ())))


def load(rollout, into, is_ours, **options):
    reader = ROSReader("latest", handle=rollout, **options)
    planner = {"planner": reader.planner()} if is_ours else {}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(into, storage_reader=reader, no_dist=True, **planner)
    return into["o"]


@pytest.mark.parametrize("is_ours", [True, False], ids=["our planner", "dcp's planner"])
def test_no_byte_of_a_peer_is_unpickled_but_by_that_list(handles, monkeypatch, is_ours):
    trainer, rollout = handles
    content = zipped(b"\x80\x02]r\xff\xff\xff\x01(K\x01X\x02\x00\x00\x00abe.")
    with monkeypatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setattr(torch, "save", lambda _, stream: stream.write(content))
        dcp.save({"o": "x"}, storage_writer=ROSWriter(1, handle=trainer), no_dist=True)
    seen, torch_load = [], torch.load
    monkeypatch.setattr(
        torch,
        "load",
        lambda stream, **options: (
            seen.append(bytes(stream.getbuffer())) or torch_load(stream, **options)
        ),
    )
    assert load(rollout, {"o": None}, is_ours) == [1, "ab"]
    assert content not in seen
    assert len(seen) == (0 if is_ours else 1)


def test_a_mesh_in_an_object_neither_waits_nor_joins(handles, monkeypatch):
    trainer, rollout = handles
    mesh = called("torch.distributed.device_mesh DeviceMesh", text("cpu"), b"]K\x00a")
    content = zipped(b"\x80\x02%s." % mesh)
    with monkeypatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setattr(torch, "save", lambda _, stream: stream.write(content))
        dcp.save({"o": "x"}, storage_writer=ROSWriter(1, handle=trainer), no_dist=True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(rollout, {"o": None}, is_ours=True)
    error = reason(caught.value)
    assert isinstance(error, UntrustedObject)
    assert "DeviceMesh" in str(error)
    assert not dist.is_initialized()


def test_no_memory_is_taken_for_more_than_a_load_may_have(handles, monkeypatch):
    trainer, rollout = handles
    with warnings.catch_warnings(action="ignore"):
        saves = {"o": list(range(100)), "w": torch.ones(1)}
        dcp.save(saves, storage_writer=ROSWriter(1, handle=trainer), no_dist=True)
    monkeypatch.setattr(objects, "BYTES_MAX", 1000)
    into = {"o": None, "w": torch.zeros(1)}
    with pytest.raises(dcp.api.CheckpointException, match="objects of this load to"):
        load(rollout, into, is_ours=True)
    assert load(rollout, into, is_ours=True, trust_objects=True) == list(range(100))
