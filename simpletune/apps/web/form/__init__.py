"""What can be set in a configuration's form, what has a user set, and what follows from it? Knows nothing of HTTP."""
