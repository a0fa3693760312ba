"""What is this machine? Files, locks, signals, devices, the console, random numbers; the base class of options."""
