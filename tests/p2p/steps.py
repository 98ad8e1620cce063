"""Steps of tests in which one transport reads another's memory, both of this process."""

import numpy as np

from torch_ros.spans import Region


def region(array):
    return Region(array.ctypes.data, array.nbytes)


def span(source, target):
    return (source.ctypes.data, target.ctypes.data, source.nbytes)


def attached(source, reader, *arrays):
    """A peer of `reader` that has `arrays` of `source` attached; and their registration."""
    registration = source.register([region(array) for array in arrays])
    peer = reader.connect(source.connection)
    peer.attach(registration.descriptor)
    return peer, registration


def prepared(reader, peer, *sources):
    """A read of all of `sources`, and where it lands."""
    targets = [np.zeros_like(source) for source in sources]
    reader.register([region(target) for target in targets])
    rows = [span(*each) for each in zip(sources, targets, strict=True)]
    return peer.prepare(np.array(rows, np.uint64)), targets
