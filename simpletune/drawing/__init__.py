"""Drawing with any weights: generate, compare, and several LoRAs on one base.

May import report, runs, pipeline and what is below them. The server and the command line may import it.
"""
