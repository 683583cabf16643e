"""One file per on-disk checkpoint format."""
