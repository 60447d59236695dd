"""Keys and values of carried rollouts after an update: recomputed or kept, both measured."""
