"""Frame-once replay: lanes of rows, one lane per environment."""
