"""Changes from one copy to the next, by which replicas update. Without it each update reads all."""
