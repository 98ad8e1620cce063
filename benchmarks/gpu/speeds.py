"""How fast copies, digests and deltas are made, beside torch's own copy of the same bytes."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import torch
from card import Card, Row, outcome, speed

import torch_ros
from torch_ros import MXFP8, Cast, Float8
from torch_ros.weights.digest import digest

COPY, MADE, HOST = 0.7, 0.3, 0.8  # aims: of a copy, of float8, of a copy to the host
DIGEST_GBS = 1000.0
CHANGED = 0.01
UPDATE_S = 60.0

Tensors = dict[str, torch.Tensor]


def opened(name: str, **options: Any) -> torch_ros.ShardHandle:
    return torch_ros.open(f"{name}-{secrets.token_hex(4)}", **options)


def copies(card: Card) -> Iterator[Row]:
    """`publish_copy` of 8 GiB on the card; quantised; and of 2 GiB to host memory."""
    size = card.size_bytes(8)
    tensors = card.matrices(size)
    size, sources = sum(each.nbytes for each in tensors.values()), [*tensors.values()]
    own_s, each_s = torch_s(card, sources)
    card.give_back()
    yield speed("torch's copy, all at once", size, own_s)
    yield speed("torch's copy, one by one", size, each_s, own_s)
    for what, transform, aim in (
        ("publish_copy", None, COPY),
        ("publish_copy, Cast(float16)", Cast(torch.float16), MADE),
        ("publish_copy, Float8 by rows", Float8(["*"]), MADE),
        ("publish_copy, Float8 by blocks", Float8(["*"], block=(128, 128)), MADE),
        ("publish_copy, MXFP8", MXFP8(["*"]), MADE),
    ):
        yield speed(what, size, published_s(card, tensors, transform=transform), own_s, aim)
        card.give_back()
    some = dict([*tensors.items()][: max(1, len(tensors) // 4)])
    size = sum(each.nbytes for each in some.values())
    pinned = [torch.empty(each.shape, dtype=each.dtype, pin_memory=card.is_gpu) for each in sources]
    pinned = pinned[: len(some)]
    pairs = [*zip(pinned, some.values(), strict=True)]
    out_s = card.usual(lambda: [to.copy_(of, non_blocking=True) for to, of in pairs])
    yield speed("torch's copy to pinned memory", size, out_s)
    back_s = card.usual(lambda: [to.copy_(of, non_blocking=True) for of, to in pairs])
    yield speed("torch's copy from pinned memory", size, back_s)
    yield speed('publish_copy(to="cpu")', size, published_s(card, some, to="cpu"), out_s, HOST)


def torch_s(card: Card, sources: list[torch.Tensor]) -> tuple[float, float]:
    """The usual time of torch's copy: of all at once, and of one after the other."""
    targets = [torch.empty_like(each) for each in sources]
    return (
        card.usual(lambda: torch._foreach_copy_(targets, sources)),
        card.usual(lambda: [to.copy_(of) for to, of in zip(targets, sources, strict=True)]),
    )


def published_s(card: Card, tensors: Tensors, **how: Any) -> float:
    """The usual time of a `publish_copy`, once both buffers are there."""
    version = 0

    def publish() -> None:
        nonlocal version
        version += 1
        handle.publish_copy(version, tensors, **how)

    with opened("copies") as handle:
        publish()  # each of the first two makes, or registers, what later ones use again
        publish()
        return card.usual(publish)


def digests(card: Card) -> Iterator[Row]:
    """Full and sampled digests of 8 GiB, beside reading all of it."""
    tensors = [*card.matrices(card.size_bytes(8)).values()]
    size = sum(each.nbytes for each in tensors)
    words = [each.view(torch.int16) for each in tensors]
    read_s = card.usual(lambda: [each.amax() for each in words])
    yield speed("torch reads it once (amax)", size, read_s)
    for depth in ("sampled", "full"):

        def all_of(depth: Any = depth) -> None:
            for each in tensors:
                digest(each, global_shape=tuple(each.shape), offsets=(0, 0), depth=depth)

        taken_s = card.usual(all_of)
        row = speed(f"digest, {depth}", size, taken_s, read_s)
        aim, gbs = f">= {DIGEST_GBS:g} GB/s", size / taken_s / 1e9
        is_met = gbs >= DIGEST_GBS if card.is_gpu and depth == "full" else None
        yield Row(row.what, row.found, row.ratio, aim if depth == "full" else "", is_met)


def deltas(card: Card) -> Iterator[Row]:
    """Deltas of copies in host memory, as they are; and how fast a card could compare and apply."""
    size = card.size_bytes(1)
    tensors = card.tensors(size, 16)
    yield from on_the_card(card, tensors)
    name = f"deltas-{secrets.token_hex(4)}"
    targets = {"host": "cpu", "card": card.device}
    trainer = torch_ros.open(name, replica="trainer", digests="full")
    readers = {place: torch_ros.open(name, replica=place, digests="full") for place in targets}
    try:
        for place, device in targets.items():
            readers[place].register({n: torch.zeros_like(t).to(device) for n, t in tensors.items()})
        for version in (1, 2, 3):
            trainer.publish_copy(version, tensors, to="cpu", deltas=2)
            for place, reader in readers.items():
                taken_s = card.seconds(lambda reader=reader: reader.update(timeout_s=UPDATE_S))
                report = reader.last_read
                assert report is not None
                yield Row(
                    f"version {version} into tensors on the {place}",
                    f"{report.via}, {1e3 * taken_s:.0f} ms, {report.bytes_read / 2**20:.1f} MiB",
                )
            change(tensors)
    finally:
        for handle in (trainer, *readers.values()):
            handle.close(linger_s=0)


def change(tensors: Tensors) -> None:
    """Flip bits of some random elements."""
    for each in tensors.values():
        is_changed = torch.rand(each.shape, device=each.device) < CHANGED
        each.view(torch.int16).bitwise_xor_(is_changed.to(torch.int16))


def on_the_card(card: Card, tensors: Tensors) -> Iterator[Row]:
    older = {name: each.clone() for name, each in tensors.items()}
    size = sum(each.nbytes for each in tensors.values())
    own_s = card.usual(lambda: [older[n].copy_(each) for n, each in tensors.items()])
    change(tensors)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def compare() -> None:
        for name, each in tensors.items():
            words = each.view(torch.int16)
            places = (words != older[name].view(torch.int16)).nonzero().squeeze(1)
            found[name] = places, words[places]

    def apply() -> None:
        for name, (places, values) in found.items():
            older[name].view(torch.int16)[places] = values

    calls: tuple[tuple[str, Callable[[], None]], ...] = (("compare", compare), ("apply", apply))
    for what, call in calls:
        yield speed(f"torch alone: {what} 1 % on the card", size, card.usual(call), own_s)
    is_same = all(torch.equal(older[name], each) for name, each in tensors.items())
    yield outcome(
        "torch alone: what was applied",
        "equal" if is_same else "not equal",
        "equal",
        is_met=is_same,
    )
