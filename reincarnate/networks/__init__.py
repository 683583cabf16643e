"""Networks of teachers and students."""
