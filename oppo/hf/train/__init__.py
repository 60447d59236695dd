"""Training models: micro-batches, the optimizer, what an update measured, and the state that a checkpoint keeps."""
