"""Rules between the sections of a configuration, by topic; ``TrainConfig.rules`` collects the problems."""
