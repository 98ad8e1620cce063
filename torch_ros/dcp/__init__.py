"""torch.distributed.checkpoint over torch_ros: publish with dcp.save, read with dcp.load.

dcp.save(state_dict, storage_writer=ROSWriter(7))
dcp.load(state_dict, storage_reader=ROSReader("latest"))

At every step of a job, with the planner that goes with it:

writer = ROSWriter(7)
dcp.save(state_dict, storage_writer=writer, planner=writer.planner())
"""

from torch_ros.dcp.default import default_handle
from torch_ros.dcp.reader import ROSReader
from torch_ros.dcp.writer import ROSWriter

__all__ = ["ROSReader", "ROSWriter", "default_handle"]
