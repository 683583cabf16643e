"""Students: learners that turn batches into a better policy, and the methods that use a teacher."""
