"""Students: parsing of specs, and construction from the teacher's weights."""
