"""Simulation: models of cost in the place of models, and no tensor, task or token."""
