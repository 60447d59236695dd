"""oppo: PPO-style RLHF as a streaming graph of async stages."""
