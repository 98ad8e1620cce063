"""A store and a transport within one process: for tests, the simulator, and "memory://"."""
