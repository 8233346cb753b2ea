"""Measurements of several processes and machines, and of what the planner predicts for them."""
