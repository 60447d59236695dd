"""Simulation: the real graph of stages with models of cost in the place of models, in virtual time."""
