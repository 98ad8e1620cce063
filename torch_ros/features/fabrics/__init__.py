"""Two ways to a process: as UCX likes within its fabric, TCP for all others. Without it, all go the
one way that UCX likes; all processes of a model have it, or none.
"""
