"""Students: learners that turn batches into a better policy."""
