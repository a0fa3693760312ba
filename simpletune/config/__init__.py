"""What may a user write? TrainConfig, read from JSON and overrides, its problems explained. Imports no torch."""
