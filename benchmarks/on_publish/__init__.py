"""Keys and values of carried rollouts after an update: computed again, or kept, measured both ways."""
