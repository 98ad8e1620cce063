"""The `torch-ros` command. Not there yet: `python -m torch_ros.store.local` is all there is."""
