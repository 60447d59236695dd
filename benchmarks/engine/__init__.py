"""What a chunk costs the engine: ``cost`` measures ``loads``, whose models are fakes."""
