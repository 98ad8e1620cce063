"""Files that a process lends: who is believed to lend one, and who has it when."""
# needs features shortcuts

import fcntl
import gc
import os
from contextlib import closing

import msgspec
import numpy as np
import pytest

from torch_ros.features.lending.memory import Closed, LentMemory, Loan, NotLent, NotYet
from torch_ros.features.shortcuts.peer import ShortcutDescriptor
from torch_ros.features.shortcuts.transport import ShortcutTransport
from torch_ros.memory.transport import MemoryTransport
from torch_ros.p2p.voucher import Neighbour, Process, Unproven
from torch_ros.spans import Region

WORD = 7 << 32 | 2**32 - 1


@pytest.fixture
def process():
    """This one, as a lender's."""
    with closing(Neighbour("agent", Process(os.getpid()))) as neighbour:
        yield neighbour


@pytest.fixture
def lent():
    memory = LentMemory("agent", 1 << 16)
    fill(memory, WORD)
    memory.open()
    return memory


def fill(memory, word):
    memory.begin()
    memory.bytes[:4] = b"abcd"
    memory.end(4)
    memory.describe(b"manifest")
    memory.name(word)


def test_a_loan_has_the_content_that_was_named(lent, process):
    with closing_loan(process, WORD) as loan:
        assert bytes(loan.memory[4096:4100]) == b"abcd"
        assert loan.manifest == b"manifest"
        assert loan.is_intact
        assert lent.offset_of(np.frombuffer(lent.bytes, np.uint8).ctypes.data) == 4096
        assert lent.offset_of(1) == 0


class closing_loan:  # noqa: N801  # as contextlib's
    def __init__(self, *args):
        self.loan = Loan(*args)

    def __enter__(self):
        return self.loan

    def __exit__(self, *_):
        self.loan.end()


def test_a_lent_buffer_cannot_be_closed_until_its_last_borrower_leaves(lent, process):
    with closing_loan(process, WORD), closing_loan(process, WORD):
        assert not lent.close()
    assert lent.close()
    assert lent.close()  # again


def test_a_closed_buffer_is_not_lent(lent, process):
    assert lent.close()
    with pytest.raises(Closed):
        Loan(process, WORD)
    with pytest.raises(NotLent):
        Loan(process, WORD + 1)


def test_a_content_whose_word_is_about_to_come_is_told_from_one_that_is_not_lent(lent, process):
    lent.name(WORD - 1)
    with pytest.raises(NotYet):
        Loan(process, WORD, WORD - 1)
    with pytest.raises(NotLent):
        Loan(process, WORD)
    lent.name(WORD)
    Loan(process, WORD, WORD - 1).end()


def test_a_buffer_that_is_filled_again_has_another_content(lent, process):
    with closing_loan(process, WORD) as loan:
        fcntl.flock(loan._fd, fcntl.LOCK_UN)
        assert lent.close()
        lent.begin()
        assert not loan.is_intact
        lent.end(4)
        assert not loan.is_intact


def test_a_file_that_its_maker_has_closed_is_never_filled_again(lent, process):
    os.dup2(os.open(os.devnull, os.O_RDONLY), lent._fd)
    assert not lent.close()


def test_a_number_that_has_become_another_files_is_left_alone(tmp_path):
    lent, path = LentMemory("agent", 16), tmp_path / "another"
    with path.open("w") as other, path.open() as third:
        fcntl.flock(other, fcntl.LOCK_EX)
        number = os.dup2(other.fileno(), lent._fd)
        lent.open()
        with pytest.raises(BlockingIOError):
            fcntl.flock(third, fcntl.LOCK_SH | fcntl.LOCK_NB)
        del lent
        gc.collect()
        os.close(number)


def test_a_borrower_of_a_file_is_not_its_lender(process):
    lent = LentMemory("agent", 1 << 16)
    fill(lent, WORD)
    lent.open()
    with closing_loan(process, WORD):
        del lent
        gc.collect()  # its file is open as the borrower has it
        with pytest.raises(NotLent):
            Loan(process, WORD)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_a_file_that_may_be_cut_short_is_not_believed(process, seals):
    other = LentMemory("agent", 16)  # closed, and without a name of its content
    link = os.readlink(f"/proc/self/fd/{other._fd}")  # noqa: PTH115
    fd = os.memfd_create(
        link.removeprefix("/memfd:").removesuffix(" (deleted)"), os.MFD_ALLOW_SEALING
    )
    os.write(fd, (1).to_bytes(8, "little") + WORD.to_bytes(8, "little") + bytes(1 << 13))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(NotLent):
        Loan(process, WORD)
    os.close(fd)


# The process behind a descriptor


@pytest.fixture
def pair():
    """A source and a reader, which are taken for two processes."""
    both = [ShortcutTransport(MemoryTransport()) for _ in range(2)]
    both[1].never = 0
    yield both
    for each in both:
        each.close()


@pytest.fixture
def registered(pair):
    memory = np.zeros(100, np.uint8)
    registration = pair[0].register([Region(memory.ctypes.data, memory.nbytes)])
    yield registration
    registration.close()


def test_a_process_that_vouches_is_found(pair, registered):
    with closing(pair[1].prove(pair[0].agent, registered.descriptor)) as process:
        assert process.process.pid == os.getpid()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "other"}, "on another host"),
        ({"host": ""}, "both ends need transport"),
        ({"process": Process(os.getpid(), 1, 3)}, "another pid namespace"),
        ({"process": Process()}, "both ends need transport"),
        ({"bounds": b""}, "does not vouch"),
    ],
)
def test_a_process_that_cannot_be_looked_at_is_said_to_be_so(pair, registered, changes, reason):
    said = msgspec.msgpack.decode(registered.descriptor, type=ShortcutDescriptor)
    if "bounds" in changes:
        changes = {"bounds": said.bounds + said.bounds}
    forged = msgspec.msgpack.encode(msgspec.structs.replace(said, **changes))
    with pytest.raises(Unproven, match=reason):
        pair[1].prove(pair[0].agent, forged)


def test_a_process_that_has_let_go_of_its_memory_is_not_believed(pair, registered):
    registered.close()
    with pytest.raises(Unproven, match="does not vouch"):
        pair[1].prove(pair[0].agent, registered.descriptor)


def test_this_very_process_and_readers_that_copy_nothing_prove_nothing(pair, registered):
    pair[1].never = os.getpid()
    with pytest.raises(Unproven, match="very process"):
        pair[1].prove(pair[0].agent, registered.descriptor)
    pair[1].is_used = False
    with pytest.raises(Unproven, match="both ends"):
        pair[1].prove(pair[0].agent, registered.descriptor)
