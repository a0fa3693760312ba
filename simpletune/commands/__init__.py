"""What a verb does, up to the run itself: one sub-package a verb. Only ``apps`` imports it."""
