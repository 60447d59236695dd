"""Training models: micro-batches, the optimizer, metrics of an update, and the state that a checkpoint keeps."""
