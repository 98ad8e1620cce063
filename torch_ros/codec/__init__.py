"""The changes between two contents, as arrays. Knows no versions and no places they lie in."""
