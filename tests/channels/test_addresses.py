"""Addresses at which a source listens, and those of a card that a reader tries."""

import socket
from contextlib import ExitStack

import pytest

from torch_ros.channels import addresses, wire
from torch_ros.channels.addresses import Listen, listeners, parse_listen, plain, routes
from torch_ros.errors import UsageError

HERE = ("boot", 7)


@pytest.mark.parametrize(
    ("text", "hosts", "ports"),
    [
        ("", (), [0]),
        ("eth0", ("eth0",), [0]),
        ("10.0.0.7,eth1:7000", ("10.0.0.7", "eth1"), [7000]),
        (":7000-7002", (), [7000, 7001, 7002]),
        ("[fd00::7]:7000", ("fd00::7",), [7000]),
        ("[fd00::7],eth0", ("fd00::7", "eth0"), [0]),
    ],
)
def test_listen_names_hosts_and_ports(text, hosts, ports):
    found = parse_listen(text)
    assert (tuple(found.hosts), list(found.ports)) == (hosts, ports)


@pytest.mark.parametrize(
    "text",
    [
        ":",
        ":0",
        ":70000",
        ":7002-7000",
        "eth0:",
        "eth0:x",
        ",eth0",
        "fd00::7",
        "eth0:1-2-3",
        "[::1",
    ],
)
def test_another_form_is_an_error_that_shows_the_right_one(text):
    with pytest.raises(UsageError, match=r"expected addresses or devices, then a port"):
        parse_listen(text)


def test_a_host_that_is_not_here_is_an_error_that_names_those_that_are():
    with pytest.raises(UsageError, match=r"no device 'nosuch' with an address; it has .*lo"):
        listeners(parse_listen("nosuch:7000"))
    with pytest.raises(UsageError, match=r"203\.0\.113\.9"):
        listeners(parse_listen("203.0.113.9"))


def closing(stack, listen):
    made, port, told = listeners(listen)
    for each in made:
        stack.callback(each.close)
    return made, port, told


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_the_first_free_port_of_a_range_is_taken_and_the_last_one_is_followed_by_an_error():
    first = free_port()
    listen = Listen(("127.0.0.1",), range(first, first + 2), f"127.0.0.1:{first}-{first + 1}")
    with ExitStack() as stack:
        assert closing(stack, listen)[1] == first
        try:
            assert closing(stack, listen)[1] == first + 1
        except UsageError:
            pytest.skip("somebody else has the next port")
        with pytest.raises(UsageError, match=f"none of 2 ports, {first} to {first + 1}, is free"):
            closing(stack, listen)


def test_everywhere_includes_both_loopbacks():
    with ExitStack() as stack:
        _, port, told = closing(stack, Listen())
        assert not any(each.is_loopback for each in told)
        socket.create_connection(("127.0.0.1", port), 5).close()


def test_an_address_and_loopback_have_one_port_and_nothing_else_answers_there():
    with ExitStack() as stack:
        made, port, told = closing(stack, parse_listen("127.0.0.2"))
        assert list(map(str, told)) == ["127.0.0.2"]
        assert sorted(each.getsockname() for each in made) == [
            ("127.0.0.1", port),
            ("127.0.0.2", port),
        ]


def test_the_kernel_tells_of_loopback():
    assert ("lo", plain("127.0.0.1")) in addresses.own()


def test_a_device_that_goes_meanwhile_hides_no_other(monkeypatch):
    there, name = addresses.own(), socket.if_indextoname
    monkeypatch.setattr(socket, "if_indextoname", lambda index: name(1 if index == 1 else 1 << 30))
    assert addresses.own() == [each for each in there if each[0] == "lo"]


def test_an_address_has_one_form():
    assert plain("::ffff:127.0.0.1") == plain("127.0.0.1")
    assert plain(bytes(10) + b"\xff\xff\x0a\0\0\7") == plain("10.0.0.7")


def card(*told, place=HERE):
    packed = [plain(each).packed if isinstance(each, str) else each for each in told]
    secrets = bytes(32), bytes(32)
    return wire.parse_card(wire.card_of("a", place, 7000, packed, secrets))


def tried(here, *told, place=HERE):
    return [(each.mode, str(each)) for each in routes(card(*told, place=place), here)]


def test_loopback_comes_first_within_a_host_and_network():
    near, far = (wire.NEAR, "127.0.0.1:7000"), (wire.SEALED, "10.0.0.7:7000")
    assert tried(HERE, "10.0.0.7") == [near, far]
    assert tried(("boot", 8), "10.0.0.7") == [far]
    assert tried(("other", 7), "10.0.0.7") == [far]
    assert tried(("", 7), "10.0.0.7", place=("", 7)) == [far]


MAPPED = bytes(10) + b"\xff\xff\x7f\0\0\1"


@pytest.mark.parametrize(
    "told", ["127.0.0.1", "::1", MAPPED, "169.254.1.1", "fe80::1", "224.0.0.1", "0.0.0.0", "::"]
)
def test_a_card_sends_no_reader_of_another_host_to_its_own_neighbourhood(told):
    assert tried(("other", 7), told) == []


def test_loopback_of_the_own_host_is_sealed_if_a_card_names_it():
    assert tried(("boot", 8), "127.0.0.1") == [(wire.SEALED, "127.0.0.1:7000")]
    assert tried(("boot", 8), "fe80::1") == []


def test_a_route_shows_an_address_as_one_types_it():
    assert tried(("other", 7), "fd00::7") == [(wire.SEALED, "[fd00::7]:7000")]


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "224.0.0.1", "[fe80::1]"])
def test_an_address_that_leads_nobody_here_is_refused_with_the_way_to_say_all(host):
    with pytest.raises(UsageError, match="leave the addresses out for all: ':7000'"):
        addresses.listeners(addresses.parse_listen(f"{host}:7000"))
