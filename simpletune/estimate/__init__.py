"""What will a run need? Memory, disk, time and price before it runs, and settings that fit a card."""
