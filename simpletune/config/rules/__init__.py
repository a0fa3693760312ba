"""Rules between the sections of a configuration, by topic; ``config_rules`` (config/check.py) collects the problems."""
