"""Updates that wait for a version, loops over versions, and policies of the user's own.

Without it, a rollout polls, and goes to the newest version.
"""
