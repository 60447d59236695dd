"""What it costs to decode in a process instead of a thread."""
