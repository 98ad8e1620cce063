"""State dicts, compared."""

import torch


def flat(tree, path=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from flat(value, (*path, key))
        else:
            yield (*path, key), value


def assert_same(left, right):
    for (path, a), (other, b) in zip(flat(left), flat(right), strict=True):
        assert path == other
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path
