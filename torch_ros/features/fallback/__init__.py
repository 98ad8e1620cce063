"""A bucket below all runs, read while no replica has a version. Without it they wait for one."""
