"""Invalid combinations of settings: one table, and the checks of kinds of students and layouts."""
