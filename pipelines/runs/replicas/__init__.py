"""Replicas of a student that train in processes of their own, without waiting for each other in every step."""
