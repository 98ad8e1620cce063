"""Digests of the content of tensors that do not depend on how the tensors are sharded.

**Units** are elements of u = 1, 2 or 4 bytes, each a little-endian unsigned number; wider ones are
words along one more, last dimension. Dimensions of size 1 are left out; a tensor without others has
one of size 1.

**Segments.** Let s be the global shape, d its last dimension, and inside = u. While d > 0 and
inside * s[d] < 1024, multiply inside by s[d], and go to dimension d - 1. The period is 1024 /
inside, rounded down. A unit with the indices i is in segment g, at place j: g is the row-major
number of i[0] to i[d-1], times s[d] / period (rounded up), plus i[d] / period; j is the row-major
number of i[d] mod period and the indices behind it.

**The sum.** With x[g, j] the j-th 32-bit word of segment g,

    sum over g of W[g] * (sum over j of T[j] * x[g, j])   modulo 2^64

with fixed, random-looking, odd 64-bit numbers T and W. A smaller unit, at byte B of its segment,
adds W[g] * (T[B div 4] << 8 * (B mod 4)) * x. Only a linear form can multiply four bytes
at a time: a partition may cut a word in two, and neither side of a cut could mix a word. The form
is multilinear hashing (Carter and Wegman, "Universal classes of hash functions", 1979; Lemire and
Kaser, "Strongly universal string hashing is fast", arXiv 1202.4961), on two levels so that few
random numbers do. Digests of parts that add up are from Bellare and Micciancio, "A new paradigm for
collision-free hashing", 1997.

**Found.** A difference in one word, always: it is less than 2^32 and its weight is odd, so
their product is not 0 modulo 2^64. Differences in several words may cancel. Let 2^v be the largest
power of two that divides all of them. Over random T and W they cancel with a probability of at
most 2^-(63-v) if they are in one segment, and (65-v) * 2^-(62-v) if in several, where an inner sum
can by chance be divisible by more. Other content has v = 0 as soon as one word differs in its
lowest bit: 2^-55. In fp32 that was widened from bf16 the lower halves are 0, so v = 16: 2^-40. The
worst are differences in nothing but the top bits of words, such as a stuck data line, or fp32
weights that all change their sign: v = 31, 2^-25. (Words of 64 bits would be nearly twice as fast.
But two flips of a top bit would cancel always, and so would two float64 that change places and
differ only in sign.) Elements, rows or blocks that change places are differences like any other.

**Not found.** A change that an attacker has made: T and W are no secret. A zero adds nothing, so a
missing part that is all zeros is not noticed by the sum: `totals` counts that every element is in.
Names, dtypes and shapes are not in a digest; compare by fqn, between tensors that are the same
`manifest.LogicalTensor`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, reduce
from itertools import pairwise, product
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from torch_ros.errors import NotSupported
from torch_ros.weights.chunked import overlapping
from torch_ros.weights.columns import Bools, Ints, group_starts
from torch_ros.weights.manifest import OBJECT, Depth, Layout

UInts = npt.NDArray[np.uint64]

# Longer: a coarser sample. Shorter: the outer sum begins to cost as much as the inner ones.
SEGMENT_BYTES = 1024
SAMPLED_OF = 64  # one segment of so many is sampled
# The first segments always are: norms and biases of 4096 elements in bf16 are checked whole.
ALWAYS_SAMPLED = 8

# Segments summed at once: enough to forget the cost of a call. Each takes some 50 bytes of
# temporaries, and on a device 2 to 8 KiB, where its content is widened to int64.
_SEGMENTS_AT_ONCE = 16384

_MODULUS = 2**64
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # what torch indexes and numpy takes
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}

# Constants that nobody chose: the first digits of pi and e, and 2^64 over the golden ratio.
_WORD_SEED = np.uint64(0x243F6A8885A308D3)
_SEGMENT_SEED = np.uint64(0xB7E151628AED2A6A)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def digest(
    chunk: torch.Tensor, *, global_shape: Sequence[int], offsets: Sequence[int], depth: Depth
) -> int:
    """The share of a chunk in the digest of its tensor: at least 0, less than 2^64.

    0 for a chunk without elements, and for "off". "sampled" covers about 1/64 of a large tensor
    and reads no other memory; which elements these are depends on the global shape and the size of
    an element only. Digests are compared and added with others of the same depth.

    The memory must not change during the call. A CUDA tensor is read on the current stream, and
    the call returns when the device is done. It takes 1 MiB of memory however large the chunk is,
    and on a CUDA device up to 128 MiB. Threads can digest different chunks in parallel.

    Args:
        chunk: A local tensor as `local_chunks` returns it; any dtype, any strides.
        global_shape: The shape of the whole tensor.
        offsets: The place in it where the chunk starts.
        depth: "full" covers every bit.
    """
    if depth == "off" or chunk.numel() == 0:
        return 0
    dot = _dot_on_host if chunk.device.type == "cpu" else _dot_on_device
    total = 0
    units = _units(chunk.detach(), tuple(global_shape), tuple(offsets))
    for part, axes, weights in _parts(*units):
        for window in _windows([len(axis) for axis in axes]):
            cut = (axis[span] for axis, span in zip(axes, window, strict=True))
            places = [np.arange(at.start, at.stop, at.step, dtype=np.uint64) for at in cut]
            numbers: UInts = reduce(np.add.outer, places)
            content = part[window]
            if depth == "sampled":
                chosen = np.nonzero(_is_sampled(numbers))
                numbers, content = numbers[chosen], content[tuple(map(torch.from_numpy, chosen))]
            total += int((_odd(numbers, _SEGMENT_SEED) * dot(content, weights)).sum())
    return total % _MODULUS


def change_digest(
    places: Ints,
    old: npt.NDArray[np.generic],
    new: npt.NDArray[np.generic],
    *,
    global_shape: Sequence[int],
    depth: Depth,
) -> int:
    """By how much the digest of a tensor grows where these elements change.

    `combine` of it and the digest of the old content is the digest of the new one, and so are
    totals: those of the changes in all chunks, added to the totals of a version, are the totals of
    the next. It shows that these places had what `old` says, if the sums agree, and nothing about
    other places. 0 for "off", and where nothing changes.

    Args:
        places: Row-major numbers of elements in the whole tensor, none twice. Ascending is fastest.
        old, new: The bits of each before and after, in numbers of the dtype's width, without gaps.
        global_shape: The shape of the whole tensor.
        depth: As in `digest`.
    """
    if depth == "off":
        return 0
    unit_bytes = min(4, old.itemsize)
    segments, inside = _in_segments(places.view(np.uint64), tuple(global_shape), old.itemsize)
    unsigned = _UNSIGNED[unit_bytes]
    change = new.view(unsigned).astype(np.uint64) - old.view(unsigned)  # modulo 2^64
    if depth == "sampled":
        chosen = np.flatnonzero(_is_sampled(segments))
        segments, inside, change = segments[chosen], inside[chosen], change[chosen]
    change *= _weights(unit_bytes)[inside.view(np.int64)]
    starts = group_starts(segments)
    sums = np.add.reduceat(change, starts)
    return int((_odd(segments[starts], _SEGMENT_SEED) * sums).sum()) % _MODULUS


def combine(parts: Iterable[int]) -> int:
    """The digest of the union of disjoint parts, from the digest of each part."""
    return sum(parts) % _MODULUS


def chunk_digests(
    layout: Layout, memory: Sequence[torch.Tensor], *, depth: Depth
) -> tuple[int, ...]:
    """The digest of each chunk of a layout, given its memory. Uses torch's number of threads."""

    def of(number: int) -> int:
        chunk = layout.chunks[number]
        shape = layout.tensors[chunk.tensor].shape
        return digest(memory[number], global_shape=shape, offsets=chunk.offsets, depth=depth)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return tuple(pool.map(of, range(len(layout.chunks)), chunksize=16))


def totals(
    layouts: Sequence[Layout], chunks: Sequence[Sequence[int]], *, depth: Depth
) -> dict[str, int]:
    """The digest of each whole tensor, from those of the chunks that ranks hold, by fqn.

    If several ranks have equal chunks, or objects, the lowest rank's counts. A tensor of which they
    hold a part has none, also where chunks of that part overlap.

    Args:
        layouts: One per rank of the group, in rank order.
        chunks: Per rank, the digest of each chunk of its layout.

    Raises: NotSupported: Chunks of a tensor have more elements than it: they overlap in part, so
        that their digests do not add up.
    """
    parts: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = {}
    whole: dict[str, tuple[int, ...]] = {}
    for layout, digests in zip(layouts, chunks, strict=True):
        of_lower_ranks = set(whole)
        for record in layout.tensors:
            whole.setdefault(record.fqn, record.shape)
        for chunk, found in zip(layout.chunks, digests, strict=True):
            record = layout.tensors[chunk.tensor]
            if record.dtype == OBJECT and record.fqn in of_lower_ranks:
                continue
            of_tensor = parts.setdefault(record.fqn, {})
            of_tensor.setdefault((chunk.offsets, chunk.sizes), found)
    held = {fqn: sum(prod(sizes) for _, sizes in boxes) for fqn, boxes in parts.items()}
    for fqn, count in held.items():
        if count > prod(whole[fqn]):
            raise NotSupported(
                f"digests={depth!r} for tensor {fqn!r}, of which ranks hold overlapping parts",
                "open with digests='off', or give each rank a part of its own",
            )
    return {
        fqn: combine(parts.get(fqn, {}).values())
        for fqn, shape in whole.items()
        if held.get(fqn, 0) == prod(shape) and _are_apart(tuple(parts.get(fqn, ())))
    }


@lru_cache(maxsize=1024)
def _are_apart(boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> bool:
    """Whether no two have an element in common. Many tensors are cut in the same way."""
    return next(overlapping(boxes), None) is None


def first_difference(found: Mapping[str, int], expected: Mapping[str, int]) -> str | None:
    """The fqn of a tensor whose digest differs from the expected one. Others may be missing."""
    return next((fqn for fqn in sorted(found) if expected.get(fqn) != found[fqn]), None)


def first_unproven(
    layouts: Sequence[Layout], chunks: Sequence[Sequence[int]], found: Mapping[str, int]
) -> str | None:
    """The fqn of a tensor of which not all chunks are proven by these totals; None: all are.

    Either it has no total; or a chunk that several ranks have, of which `totals` looks at one,
    differs among them. `layouts` and `chunks` are as for `totals`, and `found` is what that has
    returned for them: each total by its fqn.
    """
    known: dict[tuple[object, ...], int] = {}
    for layout, digests in zip(layouts, chunks, strict=True):
        for chunk, own in zip(layout.chunks, digests, strict=True):
            record = layout.tensors[chunk.tensor]
            if record.dtype == OBJECT:
                continue
            box = record.fqn, chunk.offsets, chunk.sizes
            if record.fqn not in found or known.setdefault(box, own) != own:
                return record.fqn
    return None


def _dot_on_host(content: torch.Tensor, weights: UInts) -> UInts:
    """The sums over the last dimensions of `content`, as unsigned integers, times `weights`."""
    array = content.numpy().view(_UNSIGNED[content.element_size()])
    dims = list(range(array.ndim))
    outer, inner = dims[: -weights.ndim], dims[-weights.ndim :]
    # Widens in a small buffer of its own, without the lock of the interpreter.
    sums: UInts = np.einsum(array, dims, weights, inner, outer)
    return sums


def _dot_on_device(content: torch.Tensor, weights: UInts) -> UInts:
    """The same as `_dot_on_host`, where the tensor is; only the sums are copied to the host."""
    # torch has no products of unsigned integers. Signed ones are the same modulo 2^64.
    wide = content.to(torch.int64)
    wide &= 2 ** (8 * content.element_size()) - 1
    wide *= torch.from_numpy(weights.view(np.int64)).to(content.device)
    return wide.sum(tuple(range(-weights.ndim, 0))).cpu().numpy().view(np.uint64)


def _parts(
    content: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, list[range], UInts]]:
    """A chunk in up to three parts, each with the same places of all its segments.

    A part is content, in the dimensions of the axes, then of the weights; axes, whose sums are the
    numbers of the segments; weights. In words, bf16 [4, 2000] is [4, 1000]: a row has segments of
    256, 256, 256 and 232. Rows 2 and 3 of it, words 100 to 899, so are the parts

        [2, 1, 156]  range(8, 16, 4), range(0, 1)  weights[100:256]   an end of segments 8 and 12
        [2, 2, 256]  range(8, 16, 4), range(1, 3)  weights[0:256]     all of 9, 10, 13 and 14
        [2, 1, 132]  range(8, 16, 4), range(3, 4)  weights[0:132]     a beginning of 11 and 15
    """
    unit_bytes = content.element_size()
    dim, period = _period(shape, unit_bytes)
    inner = shape[dim + 1 :]
    weights = _weights(unit_bytes)[: period * prod(inner)].reshape(period, *inner)

    step = -(-shape[dim] // period)  # segments per index of the dimension outside
    axes: list[range] = []
    for outer in reversed(range(dim)):
        first, size = offsets[outer], content.shape[outer]
        axes.insert(0, range(first * step, (first + size) * step, step))
        step *= shape[outer]

    spans = [slice(first, first + size) for first, size in zip(offsets, content.shape, strict=True)]
    start, end = spans[dim].start, spans[dim].stop
    whole = min(-(-start // period) * period, end)  # from here on, segments are whole
    rest = max(end // period * period, whole)  # up to here
    for low, high in pairwise((start, whole, rest, end)):
        if low == high:
            continue
        width = min(period, high - low)
        count, place = (high - low) // width, low % period
        yield (
            torch.unflatten(content.narrow(dim, low - start, high - low), dim, (count, width)),
            [*axes, range(low // period, low // period + count)],
            weights[slice(place, place + width), *spans[dim + 1 :]],
        )


def _period(shape: tuple[int, ...], unit_bytes: int) -> tuple[int, int]:
    """The dimension that segments cut, and how many of its indices each has."""
    dim, inside_bytes = len(shape) - 1, unit_bytes
    while dim > 0 and inside_bytes * shape[dim] < SEGMENT_BYTES:
        inside_bytes *= shape[dim]
        dim -= 1
    return dim, SEGMENT_BYTES // inside_bytes


def _in_segments(elements: UInts, shape: tuple[int, ...], item_bytes: int) -> tuple[UInts, UInts]:
    """The segment of each unit of these elements, and the unit's number in it."""
    shape = shape or (1,)
    if item_bytes > 4:
        words = np.arange(item_bytes // 4, dtype=np.uint64)
        elements = np.add.outer(elements * len(words), words).ravel()
        shape = (*shape, len(words))
    dim, period = _period(shape, min(4, item_bytes))
    inner = prod(shape[dim + 1 :])
    run = period * inner  # units of a whole segment
    if dim == 0 or shape[dim] % period == 0:
        segments = elements // run  # all are whole, but perhaps the last one
        return segments, elements - segments * run
    row = elements // (shape[dim] * inner)  # each row's last segment is shorter than the others
    elements = elements - row * (shape[dim] * inner)
    segments = elements // run
    return row * -(-shape[dim] // period) + segments, elements - segments * run


def _units(
    chunk: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]
) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """The same, counted in units: words, or elements that are smaller."""
    kept = [dim for dim, size in enumerate(shape) if size > 1]
    chunk = chunk.squeeze(tuple(dim for dim, size in enumerate(shape) if size == 1))
    shape, offsets = tuple(shape[dim] for dim in kept), tuple(offsets[dim] for dim in kept)
    if not shape:
        chunk, shape, offsets = chunk.unsqueeze(0), (1,), (0,)
    item_bytes = chunk.element_size()
    if item_bytes >= 4:
        words = chunk.unsqueeze(-1).view(torch.int32)
        return words, (*shape, item_bytes // 4), (*offsets, 0)
    packed = 4 // item_bytes  # in a word, if each row of the chunk and of the tensor is words
    lengths = (shape[-1], offsets[-1], chunk.shape[-1], chunk.storage_offset())
    if chunk.stride(-1) != 1 or any(n % packed for n in (*lengths, *chunk.stride()[:-1])):
        return chunk.view(_UNITS[item_bytes]), shape, offsets
    last = shape[-1] // packed, offsets[-1] // packed
    return chunk.view(torch.int32), (*shape[:-1], last[0]), (*offsets[:-1], last[1])


def _windows(sizes: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """A box of segments in parts that are small enough, in row-major order."""
    cuts, room = [], _SEGMENTS_AT_ONCE
    for size in reversed(sizes):
        step = min(size, room)
        cuts.append([slice(start, start + step) for start in range(0, size, step)])
        room //= step
    return product(*reversed(cuts))


@cache
def _weights(unit_bytes: int) -> UInts:
    """The weight T of each unit of a segment."""
    words = _odd(np.arange(SEGMENT_BYTES // 4, dtype=np.uint64), _WORD_SEED)
    shifts = np.arange(0, 32, 8 * unit_bytes, dtype=np.uint64)
    return (words[:, None] << shifts).ravel()


def _odd(numbers: UInts, seed: np.uint64) -> UInts:
    """Random-looking odd numbers: the generator SplitMix64 of Steele, Lea and Flood, 2014."""
    mixed = numbers * _GOLDEN + seed
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed | np.uint64(1)


def _is_sampled(segments: UInts) -> Bools:
    # Multiples of the golden ratio spread evenly: neighbours are 34, 55 or 89 segments apart.
    sampled: Bools = segments * _GOLDEN < _MODULUS // SAMPLED_OF
    return sampled | (segments < ALWAYS_SAMPLED)
