"""Does overlap change what is learned? The demo's task, paired seeds, from serial to more deferral than is good."""
