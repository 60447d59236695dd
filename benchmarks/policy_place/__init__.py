"""The cost of decoding in a process instead of a thread."""
