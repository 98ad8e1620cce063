"""The face that users see: `open` and `ShardHandle`. It alone names the features."""
