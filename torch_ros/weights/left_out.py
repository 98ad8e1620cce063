"""The tensors of a version that somebody who reads a part of it most likely wants, too."""

from collections.abc import Sequence

from torch_ros.weights.manifest import OBJECT, Layout, TensorRecord


def left_out(version: Sequence[Layout], mine: Layout, *, is_all: bool) -> list[str]:
    """The tensors of a version that `mine` lacks, though it has others from beside them.

    Beside them is: in the same dict of the state dict that was saved. A dict that is left out as a
    whole, as the optimizer's, is left out by intention. Pickled objects do not count.

    Args:
        version: The layouts of all ranks of a replica that has it.
        is_all: Whether `mine` is all that is read. Other ranks may read the layers that this one
            does not have, so what counts else is a tensor of the same module.
    """
    wanted = {record.fqn for record in mine.tensors}
    there = {record.fqn: record for layout in version for record in layout.tensors}

    def beside(record: TensorRecord) -> tuple[str | int, ...]:
        if not is_all:
            return (record.fqn.rpartition(".")[0],)
        return record.path[:-1] if record.path else ()

    read = {beside(record) for fqn, record in there.items() if fqn in wanted}
    return [
        fqn
        for fqn, record in there.items()
        if fqn not in wanted and record.dtype != OBJECT and beside(record) in read
    ]
