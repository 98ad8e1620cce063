"""One process's shard of a replica. Knows protocol and transfer; knows nothing of DCP."""
