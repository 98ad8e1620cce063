"""The changes between two contents, as arrays, and the table by which a publisher shows them."""
