"""A whole RLHF run without a network: a small language, a policy, a reward model and prompts, made on the spot."""
