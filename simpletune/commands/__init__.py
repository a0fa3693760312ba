"""What does a verb do, up to the run itself? One sub-package a verb. Only ``apps`` imports this room."""
