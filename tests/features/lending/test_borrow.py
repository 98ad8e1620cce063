"""Borrowing a version where its publisher has it: one process, a store in memory."""
# needs features transforms

import fcntl
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit import memory

from torch_ros import Chunked, Float8, errors
from torch_ros.dcp import ROSWriter
from torch_ros.features.lending import buffers
from torch_ros.features.lending.memory import Loan
from torch_ros.weights.manifest import Manifest

endpoint = pytest.fixture(memory)

SHARD_BYTES = 4 * 1000


@pytest.fixture
def lender(opened):
    return opened("lender", borrow_bytes=2 * SHARD_BYTES)


@pytest.fixture
def borrower(opened):
    return opened("borrower")


@pytest.fixture
def loans(monkeypatch):
    """All that are made."""
    made, init = [], Loan.__init__

    def make(loan, *args):
        init(loan, *args)
        made.append(loan)

    monkeypatch.setattr(Loan, "__init__", make)
    return made


def publish(lender, version):
    lender.publish_copy(version, {"w": torch.full((1000,), float(version))})


def has(tensors, version):
    return torch.equal(tensors["w"], torch.full((1000,), float(version)))


def unlock(loans):
    """As a forked child can, or a lender of another release that asks for no lock."""
    for loan in loans:
        fcntl.flock(loan._fd, fcntl.LOCK_UN)


def test_a_borrowed_version_stays_as_it_is_while_its_lender_publishes_on(lender, borrower):
    publish(lender, 1)
    with borrower.borrow() as first:
        assert (first.version, first.replica) == (1, "lender")
        for version in range(2, 12):
            publish(lender, version)
            with borrower.borrow() as latest:
                assert latest.version == version
                assert has(latest, version)
            assert has(first, 1)


def test_nothing_is_read_into_a_loan(lender, borrower, opened):
    publish(lender, 1)
    with borrower.borrow() as loan:
        reader = opened("reader", {"w": loan["w"]})
        with pytest.raises(
            errors.UsageError, match="'w' lies in memory that this process may only read"
        ):
            reader.replicate(1)


def test_tensors_of_any_dtype_and_shape_are_borrowed_as_they_are(lender, borrower):
    tensors = {
        "bf16": torch.randn(33, 7).bfloat16(),
        "column": torch.randn(128, 64)[:, 5:9],
        "complex": torch.randn(5, 3, dtype=torch.complex64),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(2.5),
        "bool": torch.tensor([True, False, True]),
        "qint32": torch.arange(5, dtype=torch.int32).view(torch.qint32),
    }
    lender.publish_copy(1, tensors)
    # Engines build their models with another default device.
    with torch.device("meta"), borrower.borrow(1) as got:
        assert got.keys() == tensors.keys()
        for fqn, tensor in tensors.items():
            assert torch.equal(as_bytes(got[fqn]), as_bytes(tensor))
            assert (got[fqn].dtype, got[fqn].shape) == (tensor.dtype, tensor.shape)


def as_bytes(tensor):
    assert tensor.is_cpu
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_a_quantised_copy_is_lent_with_its_scales(opened, borrower):
    lender = opened("lender", borrow_bytes=1 << 20)
    tensors = {f"{number}.weight": torch.randn(4, 8) for number in range(40)}
    recipe = Float8(["*.weight"], suffix="_scale" + 300 * "s")  # there is room for long names
    lender.publish_copy(1, tensors, transform=recipe, to="cpu")
    with borrower.borrow(1) as lent:
        assert len(lent) == 80
        for fqn, tensor in tensors.items():
            again = lent[fqn].float() * lent[fqn + recipe.suffix]
            assert torch.allclose(again, tensor, rtol=1 / 15, atol=0.01)


def test_ranks_that_have_a_part_each_lend_boxes(opened, borrower):
    whole = torch.arange(32.0).view(8, 4)

    def open_rank(rank):
        return opened("lender", rank=rank, world_size=2, borrow_bytes=1 << 20)

    def publish_rank(handle):
        rows = whole[4 * handle.rank : 4 * handle.rank + 4]
        sharded = Chunked((8, 4), torch.float32, {(4 * handle.rank, 0): rows})
        of_one = {f"of {handle.rank}": torch.tensor(float(handle.rank))}
        handle.publish_copy(1, {"sharded": sharded, "on all": whole, **of_one})

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(open_rank, range(2)))
        list(pool.map(publish_rank, ranks))
    with borrower.borrow() as tensors:
        assert torch.equal(tensors["on all"], whole)
        assert [float(tensors[f"of {rank}"]) for rank in range(2)] == [0.0, 1.0]
        boxes = tensors["sharded"].chunks
        assert {at: torch.equal(box, whole[at[0] : at[0] + 4]) for at, box in boxes.items()} == {
            (0, 0): True,
            (4, 0): True,
        }


def test_a_rank_without_an_element_lends_too(opened, borrower):
    def open_rank(rank):
        return opened("lender", rank=rank, world_size=2, borrow_bytes=1 << 20)

    def publish_rank(handle):
        handle.publish_copy(1, {} if handle.rank else {"w": torch.ones(3)})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(publish_rank, list(pool.map(open_rank, range(2)))))
    with borrower.borrow() as tensors:
        assert torch.equal(tensors["w"], torch.ones(3))


def test_a_copy_that_dcp_saves_is_lent_without_its_objects(lender, borrower):
    state = {"w": torch.arange(5.0), "step": 7, "note": "hello"}
    dcp.save(state, storage_writer=ROSWriter(1, handle=lender, mode="copy"), no_dist=True)
    with borrower.borrow() as tensors:
        assert tensors.keys() == {"w"}
        assert torch.equal(tensors["w"], torch.arange(5.0))


def test_a_bound_below_one_copy_lends_nothing(opened, borrower):
    lender = opened("lender", borrow_bytes=SHARD_BYTES - 1)
    publish(lender, 1)
    with pytest.raises(errors.LoanRefused):
        borrower.borrow().__enter__()


def test_a_copy_that_grows_leaves_what_is_lent_alone(lender, borrower):
    publish(lender, 1)
    with borrower.borrow() as first:
        for version, count in ((2, 1500), (3, 1100), (4, 900)):
            lender.publish_copy(version, {"w": torch.full((count,), float(version))})
        with borrower.borrow(4) as last:
            assert torch.equal(last["w"], torch.full((900,), 4.0))
            lender.publish_copy(5, {"w": torch.zeros(10)})
            with pytest.raises(
                errors.LoanRefused
            ):  # what is outgrown counts for as long as it is lent
                lender.publish_copy(6, {"w": torch.zeros(1000)})
                borrower.borrow().__enter__()
        assert has(first, 1)


def test_loans_of_small_copies_keep_no_large_buffers(opened, borrower):
    lender, megabyte = opened("lender", borrow_bytes=1 << 20), 1 << 20
    lender.publish_copy(1, {"w": torch.zeros(megabyte // 4)})
    with ExitStack() as blocks:
        for version in range(2, 12):
            publish(lender, version)
            held = blocks.enter_context(borrower.borrow())
            assert has(held, version)
        taken = sum(each.room.nbytes for each in buffers_of(lender))
        assert taken < 3.1 * megabyte
        lender.publish_copy(12, {"w": torch.ones(megabyte // 4)})
        assert has(held, 11)


def buffers_of(lender):
    [turns] = lender.copies._turns.values()
    return turns.buffers


@pytest.mark.parametrize("how", ["live", "no borrow_bytes"])
def test_tensors_that_cannot_be_lent_are_named_with_the_way_out(opened, borrower, how):
    lender = opened("lender", borrow_bytes=1 << 20 if how == "live" else 0)
    if how == "live":
        lender.register({"w": torch.zeros(3)})
        lender.publish(1)
    else:
        publish(lender, 1)
    with pytest.raises(errors.NotSupported, match=r"\(rank 0: these are live.*publish_copy"):
        borrower.borrow().__enter__()


def test_a_copy_on_a_gpu_is_not_lent(lender, borrower, monkeypatch):
    """As its lender would describe it; `tests/gpu` has one on a GPU."""

    def on_a_gpu(layout, addresses, devices, descriptor):
        return Manifest(layout, addresses, (0,) * len(devices), descriptor)

    monkeypatch.setattr(buffers, "Manifest", on_a_gpu)
    publish(lender, 1)
    with pytest.raises(
        errors.NotSupported, match=r"on a GPU, and CUDA IPC is missing.*from host memory"
    ):
        borrower.borrow().__enter__()


def test_a_version_that_only_readers_hold_is_not_lent(opened, lender, borrower):
    publish(lender, 1)
    reader = opened("reader", {"w": torch.zeros(1000)})
    reader.replicate()
    publish(lender, 2)
    lender.unpublish()
    with pytest.raises(errors.LoanRefused, match="'reader'"):
        borrower.borrow(1).__enter__()
    with pytest.raises(errors.DeadlineExceeded, match="held by replicas that read it"):
        borrower.borrow(timeout_s=0.2).__enter__()


def test_a_borrower_waits_for_the_next_publication(opened, lender, borrower):
    def borrow():
        with borrower.borrow() as tensors:
            return float(tensors["w"][0])

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(borrow)
        publish(lender, 3)
        assert waiting.result(20) == 3


def test_nothing_is_read_into_a_copy_that_is_lent(opened, borrower):
    lender, other = (opened(name, borrow_bytes=SHARD_BYTES) for name in ("lender", "other"))
    publish(lender, 1)
    with borrower.borrow() as tensors:
        lender.unpublish()
        publish(other, 2)
        with pytest.raises(errors.UsageError, match="only a copy"):
            lender.replicate()
        got = {"w": torch.zeros(1000)}
        lender.register(got)
        lender.replicate()
        assert has(tensors, 1)
    assert torch.equal(got["w"], torch.full((1000,), 2.0))


def test_who_says_what_it_uses_borrows_within_an_install_only(opened, lender):
    lender.publish_copy(1, {"w": torch.ones(4)})
    engine = opened("engine", installs=True)
    with pytest.raises(errors.UsageError, match="within `with handle.installing"), engine.borrow(1):
        pass
    with engine.installing(1):
        with pytest.raises(errors.VersionNotFound), engine.borrow(0):
            pass
        with engine.borrow(1) as borrowed:
            assert borrowed.version == 1


def test_a_version_that_is_no_version_is_refused(borrower):
    with pytest.raises(errors.UsageError):
        borrower.borrow("newest").__enter__()


@pytest.mark.parametrize("end", ["unpublish", "close"])
def test_a_loan_goes_on_when_the_version_is_given_up(lender, borrower, end):
    publish(lender, 1)
    with borrower.borrow() as tensors:
        getattr(lender, end)()
        gc.collect()
        assert has(tensors, 1)


def test_a_handle_that_is_closed_inside_the_block_changes_nothing(lender, borrower):
    publish(lender, 1)
    with borrower.borrow() as tensors:
        borrower.close()
        publish(lender, 2)
        publish(lender, 3)
        assert has(tensors, 1)
    with pytest.raises(errors.ClosedError):
        borrower.borrow().__enter__()


def test_tensors_that_are_kept_stay_mapped(lender, borrower):
    publish(lender, 1)
    with borrower.borrow() as tensors:
        kept = tensors["w"][5:]
        del tensors
    gc.collect()
    lender.close()
    assert torch.equal(kept, torch.ones(995))


def test_a_borrower_is_told_of_what_was_written_meanwhile(lender, borrower, loans):
    publish(lender, 1)
    with pytest.raises(errors.LoanBroken, match=r"version 1.*'lender'"), borrower.borrow():
        unlock(loans)
        publish(lender, 2)
        publish(lender, 3)
    with borrower.borrow() as tensors:
        assert has(tensors, 3)


def test_an_error_in_the_block_is_told_with_that_of_the_loan(lender, borrower, loans):
    publish(lender, 1)
    with pytest.raises(ZeroDivisionError), borrower.borrow():
        1 / 0  # noqa: B018
    with pytest.raises(errors.LoanBroken) as told, borrower.borrow():
        unlock(loans)
        publish(lender, 2)
        publish(lender, 3)
        1 / 0  # noqa: B018
    assert isinstance(told.value.__context__, ZeroDivisionError)


def test_ctrl_c_in_the_block_stays_ctrl_c_and_ends_the_loan(opened, borrower, loans):
    lender = opened("lender", borrow_bytes=SHARD_BYTES)
    publish(lender, 1)
    with pytest.raises(KeyboardInterrupt) as told, borrower.borrow():
        raise KeyboardInterrupt
    assert not hasattr(told.value, "__notes__")
    publish(lender, 2)
    with pytest.raises(KeyboardInterrupt) as told, borrower.borrow():
        unlock(loans[1:])
        publish(lender, 3)
        publish(lender, 4)
        raise KeyboardInterrupt
    assert "written over" in told.value.__notes__[0]
    publish(lender, 5)
    with borrower.borrow() as tensors:
        assert has(tensors, 5)


def test_an_interrupted_look_leaves_nothing_locked(opened, borrower, monkeypatch):
    lender = opened("lender", borrow_bytes=SHARD_BYTES)
    publish(lender, 1)
    manifest = Loan.manifest
    monkeypatch.setattr(Loan, "manifest", property(lambda _: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        borrower.borrow().__enter__()
    monkeypatch.setattr(Loan, "manifest", manifest)
    publish(lender, 2)
    with borrower.borrow() as tensors:
        assert has(tensors, 2)


def test_files_that_were_all_closed_leave_the_loan_as_it_is(lender, borrower, loans):
    publish(lender, 1)
    with borrower.borrow() as tensors:
        [loan] = loans
        other = os.open(os.devnull, os.O_RDONLY)
        os.dup2(other, loan._fd)  # as if the number had been used again
        for version in range(2, 5):
            publish(lender, version)
        assert has(tensors, 1)
    assert os.fstat(loan._fd).st_ino == os.fstat(other).st_ino
    os.close(other)


def test_a_child_that_is_forked_in_the_block_reads_on_and_ends_nothing(lender, borrower):
    publish(lender, 1)
    with ExitStack() as block:
        tensors = block.enter_context(borrower.borrow())
        child = os.fork()
        if not child:
            block.close()
            os._exit(0 if has(tensors, 1) else 1)
        assert os.waitpid(child, 0)[1] == 0
        for version in range(2, 5):
            publish(lender, version)
        assert has(tensors, 1)


@pytest.mark.long
def test_a_hundred_loans_leave_no_file_and_no_mapping(lender, borrower):
    publish(lender, 1)
    gc.collect()
    files, mappings = count_of("fd"), count_of("maps")
    for _ in range(100):
        with borrower.borrow() as tensors:
            assert has(tensors, 1)
    del tensors
    gc.collect()
    assert count_of("fd") == files
    assert count_of("maps") <= mappings + 10


def count_of(what):
    here = Path("/proc/self") / what
    lines = here.iterdir() if here.is_dir() else here.read_text().splitlines()
    return sum(what == "fd" or "torch_ros lent" in line for line in lines)
