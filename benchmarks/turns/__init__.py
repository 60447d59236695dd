"""What a tool's answer costs the rollouts that are decoded meanwhile."""
