"""The promises of every object store: S3 of moto, one that overwrites, the Hub, a directory."""

import functools
import http.client
import os
import subprocess
import sys
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

import torch_ros.bucket
from puppets import free_port
from puppets.objects import ObjectServer
from torch_ros.bucket import hub, objects
from torch_ros.errors import BucketError, UnreadableVersion, UsageError

pytest.importorskip("obstore")
MOTO = pytest.param("moto", marks=[pytest.mark.long, pytest.mark.xdist_group("moto")])
KINDS = (MOTO, "strict", "overwrites", "hub", "directory", "memory")
KEEPS = {"moto", "strict", "directory", "memory"}


@pytest.fixture(scope="module")
def moto():
    """The variables of moto's server, with an empty bucket."""
    pytest.importorskip("moto.server", exc_type=ImportError)
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await_bucket(port)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.wait()


def await_bucket(port):
    """Returns when a bucket was made."""
    deadline = time.monotonic() + 100
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("PUT", "/weights")
            assert connection.getresponse().status == 200
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        finally:
            connection.close()


@pytest.fixture
def server(monkeypatch):
    """A store of this test's own, which S3 URLs lead to."""
    server = ObjectServer(page=3)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.fixture(params=KINDS)
def url(request, monkeypatch, tmp_path):
    match request.param:
        case "moto":
            for name, value in request.getfixturevalue("moto").items():
                monkeypatch.setenv(name, value)
        case "strict" | "overwrites" as kind:
            request.getfixturevalue("server").keeps_creates = kind == "strict"
        case "hub":
            huggingface_hub = pytest.importorskip("huggingface_hub")
            from puppets.hub import FakeHub

            api = functools.partial(FakeHub, request.getfixturevalue("server"))
            monkeypatch.setattr(huggingface_hub, "HfApi", api)
            return f"hf://buckets/owner/name/{uuid.uuid4().hex}"
        case "directory":
            return str(tmp_path / "there")
        case "memory":
            return f"memory://{uuid.uuid4().hex}"
    return f"s3://weights/{uuid.uuid4().hex}"


@pytest.fixture
def store(url):
    return hub.opened(url)


def keys(store, prefix="v"):
    return [each.key for each in store.list(prefix)]


def test_objects_are_listed_in_order_with_their_sizes_and_read_back(store):
    names = [f"v/{n:02d}-a%2Fb@c.json" for n in range(8)]
    for n, name in reversed(list(enumerate(names))):
        assert store.create(name, b"x" * n)
    assert [(each.key, each.size_bytes) for each in store.list("v")] == list(
        zip(names, range(8), strict=True)
    )
    assert keys(store, "none") == []
    assert store.get(names[5]) == b"xxxxx"
    assert store.get("v/none") is None
    store.delete([names[0], "v/none", *names[3:]])
    assert keys(store) == names[1:3]


def test_a_large_object_is_put_as_it_comes_and_read_by_ranges(store):
    whole = bytes(range(256)) * (70 << 10)  # 17.5 MiB: three parts

    def content():
        view = memoryview(whole)
        for start in range(0, len(whole), 3 << 20):
            yield view[start : start + (3 << 20)]

    store.put("v/file", content())
    assert [each.size_bytes for each in store.list("v")] == [len(whole)]
    ranges = [(0, 10), (5 << 20, (5 << 20) + 77), (9 << 20, len(whole)), (1, 2)]
    found = store.get_ranges("v/file", *zip(*ranges, strict=True))
    assert [bytes(each) for each in found] == [whole[start:end] for start, end in ranges]
    with pytest.raises(BucketError, match="v/file"):
        store.get_ranges("v/file", [len(whole) - 5], [len(whole) + 1])
    with pytest.raises(BucketError, match="v/none"):
        store.get_ranges("v/none", [0], [1])


def test_content_that_fails_leaves_no_object_and_its_error_is_raised(store):
    def content(error):
        yield b"x" * (9 << 20)
        raise error

    for error in (ZeroDivisionError("why"), UsageError("why"), KeyboardInterrupt("why")):
        with pytest.raises(type(error), match="why"):
            store.put("v/file", content(error))
        assert keys(store) == []


def test_a_folder_shows_what_a_killed_writer_left_until_it_is_deleted(tmp_path):
    store, seen = objects.ObjectStore(str(tmp_path)), []

    def content():
        yield b"x" * (objects.UPLOAD_PART_BYTES + 1)
        yield b"y"
        with ThreadPoolExecutor(1) as pool:  # this thread is obstore's
            seen.extend(pool.submit(keys, store).result())

    store.put("v/a%2Fb.json", content())
    assert seen == ["v/a%2Fb.json#1"]
    assert keys(store) == ["v/a%2Fb.json"]
    left = [tmp_path / "v/file#1", tmp_path / "v/other/file#12"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    assert keys(store)[1:] == ["v/file#1", "v/other/file#12"]
    store.delete(["v/file#1", "v/other/file#12", "v/none#1"])
    assert keys(store) == ["v/a%2Fb.json"]


def test_one_of_many_creates_wins_or_the_probe_says_that_none_does(store, url, request):
    is_kept = store.probe("v")
    assert is_kept == (request.node.callspec.params["url"] in KEEPS)
    assert keys(store) == []
    start = threading.Barrier(8)

    def create(number):
        start.wait()
        return hub.opened(url).create("v/one", b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    if is_kept:
        assert won == [b"%d" % n == store.get("v/one") for n in range(8)]


def test_what_a_create_finds_of_its_own_content_is_its_own(store):
    assert store.create("v/one", b"same")
    assert store.create("v/one", b"same")


@pytest.mark.parametrize("fault", ["503", "lost"])
def test_requests_that_fail_for_a_while_are_made_again(server, fault):
    store = objects.ObjectStore("s3://weights/p")
    server.faults[:] = [fault] * 2
    assert store.create("v/one", b"1")
    server.faults[:] = [fault]
    store.put("v/two", iter([b"2" * (9 << 20)]))
    server.faults[:] = [fault]
    assert keys(store) == ["v/one", "v/two"]
    server.faults[:] = [fault]
    assert store.get("v/one") == b"1"
    server.faults[:] = [fault]
    assert [bytes(each) for each in store.get_ranges("v/two", [1, 4], [3, 5])] == [b"22", b"2"]
    server.faults[:] = [fault]
    store.delete(["v/one"])
    assert keys(store) == ["v/two"]


def test_a_create_that_lost_its_reply_and_then_a_race_says_who_has_won(server):
    store = objects.ObjectStore("s3://weights/p")
    server.faults[:] = ["lost"]
    assert store.create("v/one", b"mine")  # 412 by its own first request
    server.objects["p/v/two"] = b"theirs"
    server.faults[:] = ["lost"]
    assert not store.create("v/two", b"mine")


def test_a_create_that_meets_another_one_under_way_says_who_has_won(server):
    store = objects.ObjectStore("s3://weights/p")
    server.faults[:] = ["409"]  # S3: two creates of a key at the same time
    server.objects["p/v/one"] = b"theirs"
    assert not store.create("v/one", b"mine")
    server.faults[:] = ["409"]
    assert store.create("v/two", b"mine")
    assert server.objects["p/v/two"] == b"mine"
    server.faults[:] = ["409", None] * 9
    with pytest.raises(BucketError, match="cannot be created, 5 times"):
        store.create("v/three", b"mine")


@pytest.mark.long
@pytest.mark.parametrize("ask", ["get", "get_ranges", "list"])
def test_a_reply_that_is_cut_short_is_never_taken_for_all_of_it(server, ask):
    store = objects.ObjectStore("s3://weights/p")
    store.put("v/file", [bytes(range(250)) * 9])
    do = {
        "get": lambda: store.get("v/file") == bytes(range(250)) * 9,
        "get_ranges": lambda: bytes(store.get_ranges("v/file", [1], [9])[0]) == bytes(range(1, 9)),
        "list": lambda: keys(store) == ["v/file"],
    }[ask]
    if ask != "list":  # the archiver lists again
        server.faults[:] = ["truncated"]
        assert do()
    server.faults[:] = ["truncated"] * 30
    with pytest.raises(BucketError):
        do()


def test_an_upload_whose_last_reply_was_lost_is_an_object(server):
    store = objects.ObjectStore("s3://weights/p")
    server.faults[:] = [None, None, None, "lost"]  # begin, two parts, end
    store.put("v/file", [b"1" * (9 << 20)])
    assert len(server.objects["p/v/file"]) == 9 << 20


@pytest.mark.parametrize("at", ["part", "end"])
def test_an_upload_that_the_store_has_lost_is_no_object_and_the_next_one_is(server, at):
    store = objects.ObjectStore("s3://weights/p")

    def content():
        yield b"1" * (9 << 20)
        server.uploads.clear()
        yield b"2" * (9 << 20 if at == "part" else 1)

    with pytest.raises(BucketError, match="v/file"):
        store.put("v/file", content())
    assert keys(store) == []
    store.put("v/file", [b"1" * (9 << 20)])
    assert keys(store) == ["v/file"]


def test_an_end_of_an_upload_that_fails_after_a_good_status_is_made_again(server):
    store = objects.ObjectStore("s3://weights/p")
    server.faults[:] = [None, None, None, "200 error"]
    store.put("v/file", [b"1" * (9 << 20)])
    assert keys(store) == ["v/file"]


def test_an_object_has_no_more_parts_than_a_store_takes(server, monkeypatch):
    store, size_bytes = objects.ObjectStore("s3://weights/p"), (26 << 20) + 1
    monkeypatch.setattr(objects, "PARTS_MAX", 2)
    store.put("v/file", (b"x" * (1 << 20) for _ in range(26)), size_bytes=size_bytes)
    assert server.asked.count("PUT p/v/file") == 2
    assert len(server.objects["p/v/file"]) == 26 << 20


def test_parts_grow_with_their_object():
    gib, mib = 1 << 30, 1 << 20
    for size_bytes, found in ((0, 8), (78 * gib, 8), (80 * gib, 9), (5 << 40, 525)):
        assert objects.upload_part_bytes(size_bytes) == found * mib
    for size_bytes in (objects.UPLOAD_PART_BYTES * 10_000 + extra for extra in (-1, 0, 1)):
        part = objects.upload_part_bytes(size_bytes)
        assert -(-size_bytes // part) <= 10_000
        assert part % mib == 0
    assert objects.upload_part_bytes(objects.UPLOAD_PART_BYTES * 10_000 + 1) == 9 * mib


@pytest.mark.long
def test_a_store_that_dribbles_is_given_up(server, monkeypatch):
    monkeypatch.setattr(objects, "REQUEST_S", 1.0)
    monkeypatch.setattr(objects, "RETRY_S", 0.1)
    store = objects.ObjectStore("s3://weights/p")
    store.put("v/file", [b"x" * 100_000])
    server.faults[:] = ["dribbles"] * 20
    began_s = time.monotonic()
    try:
        for ask in (lambda: store.get("v/file"), lambda: store.get_ranges("v/file", [0], [90_000])):
            with pytest.raises(BucketError, match="check that the store answers"):
                ask()
    finally:
        server.resumed.set()
    assert time.monotonic() - began_s < 30


def test_a_store_that_never_answers_is_given_up_with_a_way_out(server, monkeypatch):
    monkeypatch.setattr(objects, "RETRIES", 1)
    store = objects.ObjectStore("s3://weights/p")
    server.faults[:] = ["503"] * 5
    with pytest.raises(BucketError, match="check that the store answers") as caught:
        store.get("v/one")
    assert (caught.value.url, caught.value.key) == ("s3://weights/p", "v/one")
    server.faults[:] = ["deny"]
    with pytest.raises(BucketError, match="credentials the right"):
        store.create("v/one", b"1")


def test_who_has_no_credentials_is_told_so(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(objects, "RETRIES", 0)
    with pytest.raises(BucketError, match="give this process credentials for it"):
        objects.ObjectStore("s3://weights/p").get("v/one")


@pytest.mark.parametrize("limit", ["READ_S", "REQUEST_S"])
def test_a_store_that_stalls_is_given_up(server, monkeypatch, limit):
    monkeypatch.setattr(objects, limit, 0.3)
    monkeypatch.setattr(objects, "RETRIES", 0)
    store = objects.ObjectStore("s3://weights/p")
    server.faults[:] = ["stalls"] * 4
    try:
        with pytest.raises(BucketError, match="check that the store answers"):
            store.get("v/one")
        with pytest.raises(BucketError, match="check that the store answers"):
            store.put("v/two", [b"2" * (9 << 20)])
    finally:
        server.resumed.set()


def test_an_object_that_was_cut_short_is_refused(server):
    store = objects.ObjectStore("s3://weights/p")
    store.put("v/file", [b"0123456789"])
    server.objects["p/v/file"] = b"01234"
    with pytest.raises(BucketError, match="it has 5 bytes, and not 8"):
        store.get_ranges("v/file", [2], [8])


def test_a_store_that_cannot_be_listed_is_found_by_the_probe(server, monkeypatch):
    store = objects.ObjectStore("s3://weights/p")
    monkeypatch.setattr(server, "listed", lambda query: b"<ListBucketResult/>")
    with pytest.raises(BucketError, match="a list does not show what was put"):
        store.probe("v")


@pytest.mark.parametrize("url", ["", "ftp://b", "memory://", "http://b/x"])
def test_a_url_of_no_store_is_refused(url):
    with pytest.raises(UsageError, match="names no store"):
        objects.ObjectStore(url)


@pytest.mark.parametrize(
    "url", ["hf://", "hf://owner/name", "hf://buckets/owner", "hf://buckets//n"]
)
def test_a_url_of_no_bucket_of_the_hub_is_refused(url):
    with pytest.raises(UsageError, match="expected hf://buckets/owner/name"):
        hub.opened(url)


def test_prefixes_of_the_hub_are_folders_and_its_failures_are_of_the_bucket(server, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from puppets.hub import FakeHub

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: FakeHub(server))
    one, other = (hub.opened(f"hf://buckets/owner/name{prefix}") for prefix in ("", "/v"))
    one.create("v/1", b"1")
    one.create("vv/1", b"22")
    assert keys(one) == ["v/1"]
    assert other.get("1") == b"1"
    server.faults[:] = ["503"]
    assert bytes(one.get_ranges("v/1", [0], [1])[0]) == b"1"  # it asks again
    server.faults[:] = ["deny"]
    with pytest.raises(BucketError, match="HF_TOKEN") as caught:
        one.get_ranges("v/1", [0], [1])
    assert (caught.value.url, caught.value.key) == ("hf://buckets/owner/name", "v/1")
    assert torch_ros.bucket.open("hf://buckets/owner/name", "m").list() == {}
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="extra hub"):
        hub.opened("hf://buckets/owner/name")


def test_without_the_extra_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match="extra bucket"):
        objects.ObjectStore("memory://x")


XHTML = b"""<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title>Console
</title></head><body><p>Log in</p></body></html>"""
PAGE = b"<!doctype html><html><head><title>Console</title></head><body>Log in</body></html>"
CUT = b"""<?xml version="1.0"?><ListBucketResult><IsTruncated>true</IsTruncated><Contents>
<Key>zzz/one</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"a"</ETag><Size>3</Size>
</Contents></ListBucketResult>"""
ANSWERS = {  # to a list, and to a get
    "a page": ((200, PAGE, {}), (200, PAGE, {})),
    "a page that is not there": ((200, PAGE, {}), (404, PAGE, {})),
    "nothing": ((200, b"", {}), (200, b"", {})),
    "no page": ((200, b"<ListBucketResult/>", {}), (404, b"", {})),
    "a login": ((302, b"", {"Location": "/login"}), (302, b"", {"Location": "/login"})),
    "a circle": ((302, b"", {"Location": "/weights"}), (302, b"", {"Location": "/weights"})),
    "another region": ((301, b"<Error/>", {}), (301, b"<Error/>", {})),
    "no right to list": (
        (403, b"<Error/>", {}),
        (404, b"<Error><Code>NoSuchKey</Code></Error>", {}),
    ),
    "no right to get": ((200, b"<ListBucketResult/>", {}), (403, b"<Error/>", {})),
    "no bucket": (
        (200, b"<ListBucketResult/>", {}),
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", {}),
    ),
    "another bucket": ((200, CUT, {}), (404, b"<Error><Code>NoSuchKey</Code></Error>", {})),
    "half a list": ((200, CUT[:90], {}), (404, b"<Error><Code>NoSuchKey</Code></Error>", {})),
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS.keys())
def test_what_is_no_list_of_a_store_is_never_an_empty_bucket(server, monkeypatch, answers):
    monkeypatch.setattr(objects, "RETRIES", 0)

    def reply(_, key, *__):
        return (200, PAGE, {}) if key == "login" else answers[bool(key)]

    monkeypatch.setattr(server, "reply", reply)
    with pytest.raises(BucketError) as caught:
        torch_ros.bucket.open("s3://weights/p", "m").list()
    assert caught.value.url == "s3://weights/p"


def test_a_bucket_that_is_empty_is_believed_at_the_cost_of_a_get(server):
    assert torch_ros.bucket.open("s3://weights/p", "m").list() == {}
    assert [each.split()[0] for each in server.asked] == ["GET", "GET"]
    server.objects["p/m/x"] = b""
    assert torch_ros.bucket.open("s3://weights/p", "m").list() == {}
    assert len(server.asked) == 3


@pytest.mark.parametrize("page", [XHTML, b"<ListBucketResult/>"], ids=["page", "nothing"])
def test_a_list_that_does_not_show_what_writers_leave_is_none(server, monkeypatch, page):
    """All objects are there for those who get them; a list is answered by somebody else."""
    bucket = torch_ros.bucket.open("s3://weights/p", "m")
    bucket.store.mark("m")
    assert bucket.list() == {}
    with monkeypatch.context() as patch:
        patch.setattr(server, "listed", lambda _: page)
        with pytest.raises(BucketError, match="a list of it is empty, and 'torch_ros' is in it"):
            bucket.list()
    assert bucket.list() == {}


def test_a_writer_that_begins_while_a_bucket_is_looked_at_is_no_reason_for_doubt(
    server, monkeypatch
):
    bucket, listed = torch_ros.bucket.open("s3://weights/p", "m"), server.listed

    def late(query):
        found = listed(query)
        server.objects["p/m/torch_ros"] = objects.MARK
        return found

    monkeypatch.setattr(server, "listed", late)
    assert bucket.list() == {}


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_list_that_a_gateway_cuts_short_is_read_to_its_end_or_refused(
    server, monkeypatch, goes_on
):
    monkeypatch.setattr(objects, "PAGE", 4)
    server.objects |= {f"p/v/{n}": b"" for n in range(6)}
    server.page, listed = 4, server.listed

    def cut(query):
        query = query if goes_on else {"prefix": query["prefix"]}
        return (
            listed(query)
            .replace(b"<NextContinuationToken>", b"<Next>")
            .replace(b"</NextContinuationToken>", b"</Next>")
        )

    monkeypatch.setattr(server, "listed", cut)
    store = objects.ObjectStore("s3://weights/p")
    if goes_on:
        assert keys(store) == [f"v/{n}" for n in range(6)]
    else:
        with pytest.raises(BucketError, match="ends after 4, and begins anew"):
            keys(store)


def test_a_folder_is_made_by_writers_alone(tmp_path):
    folder = tmp_path / "disk" / "bucket"
    store = objects.ObjectStore(str(folder))
    for ask in (keys, lambda store: store.get("v/one"), lambda store: store.delete(["v/one"])):
        with pytest.raises(BucketError, match="there is no such folder; mount its disk"):
            ask(store)
    assert not (tmp_path / "disk").exists()
    folder.mkdir(parents=True)  # the point where a disk is mounted
    with pytest.raises(BucketError, match="its folder is empty; mount its disk"):
        keys(store)
    store.make("v")
    assert keys(store) == []
    store.create("v/one", b"1")
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    with pytest.raises(BucketError, match="no such folder"):
        keys(store)
    (tmp_path / "elsewhere").rename(tmp_path / "disk")
    assert keys(store) == ["v/one"]


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:CANARY@weights/x",
        "s3://AKIAKEY:CAN/ARY@weights/x",
        "s3://AKIAKEY:CANARY",
        "s3:/AKIAKEY:CANARY@weights/x",
        "az://container/x?sig=CANARY",
        "gs://weights/x?X-Goog-Signature=CANARY",
        "hf://buckets/o/n?token=CANARY",
        "hf://CANARY@buckets/o/n",
        "https://u:CANARY@host/x",
        "memory://x?CANARY",
        "s3://weights/x%3Ftoken=CANARY",
        "s3://weights/x%253Ftoken=CANARY",
        "s3://weights/x&token=CANARY",
        "s3://weights/x;X-Amz-Signature=CANARY/y",
        "s3://weights/AWSAccessKeyId=CANARY",
        "s3://weights/k:CANARY@x",
        "s3://weights/a/k:CAN/CANARY@x",
        "s3://weights/k%3ACANARY%40x",
        "s3:weights?token=CANARY",
        "file:///f?sig=CANARY",
        "file:///f%3Fsig=CANARY",
        "s3://weights/x#CANARY",
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url):
    for ask in (hub.opened, lambda url: torch_ros.open("m", endpoint="memory://x", bucket=url)):
        with pytest.raises(UsageError, match="names no store|begins with") as caught:
            ask(url)
        assert "CANARY" not in "".join(traceback.format_exception_only(caught.value))
        assert caught.value.__cause__ is None


def test_an_object_for_which_too_much_memory_would_be_taken_is_refused(store, monkeypatch):
    monkeypatch.setattr(objects, "SMALL_BYTES", 10)
    store.create("v/small", b"1" * 10)
    store.create("v/large", b"1" * 11)
    assert store.get("v/small") == b"1" * 10
    with pytest.raises(UnreadableVersion, match="it has 11 bytes, expected at most 10"):
        store.get("v/large")


@pytest.mark.parametrize(
    "prefix", ["date=2026-11-27", "team@site", "a:b", "tokenizer=x", "100%", "monkey=1"]
)
def test_what_is_no_secret_may_be_a_prefix(prefix):
    assert objects.ObjectStore(f"s3://weights/{prefix}").url.endswith(prefix)


def test_an_endpoint_with_a_password_is_not_repeated(server, monkeypatch, caplog):
    address = os.environ["AWS_ENDPOINT_URL"].partition("://")[2]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:CANARY@{address}")
    monkeypatch.setattr(objects, "RETRIES", 0)
    server.is_away = True
    store = objects.ObjectStore("s3://weights/p")
    with pytest.raises(BucketError) as caught:
        keys(store)
    assert "CANARY" not in "".join(traceback.format_exception(caught.value)) + caplog.text
    assert "://...@" in str(caught.value)
