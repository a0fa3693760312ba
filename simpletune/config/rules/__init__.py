"""What a configuration's fields ask of each other, by topic; ``TrainConfig.rules`` collects the problems."""
