"""The versions that engines use. Without it a trainer knows which version a replica holds, and not
whether its engine generates with it.
"""
