"""Changes up to a newer version, staged beside the one in use. Without it an update reads them."""
