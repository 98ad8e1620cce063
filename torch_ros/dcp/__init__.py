"""torch.distributed.checkpoint over torch_ros: publish with dcp.save, read with dcp.load.

dcp.save(state_dict, storage_writer=ROSWriter(7))
dcp.load(state_dict, storage_reader=ROSReader("latest"))
"""

from torch_ros.dcp.default import default_handle
from torch_ros.dcp.reader import ROSReader
from torch_ros.dcp.writer import ROSWriter

__all__ = ["ROSReader", "ROSWriter", "default_handle"]
