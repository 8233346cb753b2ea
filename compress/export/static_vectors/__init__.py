"""Export of static students' tables of token vectors to libraries that average such vectors."""
