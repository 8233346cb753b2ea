"""Students: read from a spec, built from the teacher's weights."""
