"""Parts that a replica can do without, a folder each. The core knows none, and none another."""
