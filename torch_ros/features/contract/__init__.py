"""A handle looks whether published tensors are written to, which they must not be.

Without it readers get a mixture of two contents, and nobody is told: no `unpublish` finds what
torch has counted, or digests tell, no version is withdrawn, and no optimizer is guarded.
"""
