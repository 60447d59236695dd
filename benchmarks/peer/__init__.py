"""TRL's trainers of PPO and GRPO as contestants of the ladder, and the settings under which each is fastest."""
