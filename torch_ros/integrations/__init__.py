"""Where the tensors of a version go in an engine. Knows torch; knows no peer and no version."""
