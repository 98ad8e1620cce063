"""What a replica can do without, a folder each. The core knows none of them, and none another."""
