"""What does a verb other than ``train`` do? One sub-package a verb. Only ``apps`` imports this room."""
