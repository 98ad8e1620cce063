"""A trainer and rollouts on this host, for who has just installed the package."""
