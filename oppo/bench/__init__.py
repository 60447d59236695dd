"""Measurements of oppo itself: what overlap gains, and what the engine costs."""
