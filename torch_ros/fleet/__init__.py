"""All of a model's records as values, for tools and metrics. Knows no calls and no tensors."""
