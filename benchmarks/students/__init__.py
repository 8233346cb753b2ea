"""Measurements of students: their construction, their recipes and their speeds."""
