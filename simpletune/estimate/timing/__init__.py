"""How long do operations take? By a device's measured constants, or the data sheet of a card."""
