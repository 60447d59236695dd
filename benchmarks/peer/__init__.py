"""TRL's PPO trainer as a contestant of the ladder, and the settings under which it is fastest."""
