"""A slow reader stops relaying. Without it a chain of relays is as fast as its slowest link."""
