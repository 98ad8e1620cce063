"""The release of this package, as records and people are told."""

RELEASE = "0.1.0"
