"""Which sections of a configuration contradict each other? Rules by topic."""
