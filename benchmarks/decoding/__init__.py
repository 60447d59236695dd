"""Our decoder beside ``generate``: ``compare`` measures a model and a batch, ``cases`` names those worth it."""
