"""Ranks of an engine, each in a thread."""


class Ranks:
    """The words of all ranks, by their threads; one that stands alone is left after 10 s."""

    def __init__(self, rank, barrier, said):
        self.rank, self.size, self.barrier, self.said = rank, 2, barrier, said

    def gather(self, mine):
        self.said[self.rank] = mine
        self.barrier.wait()
        found = list(self.said)
        self.barrier.wait()
        return found
