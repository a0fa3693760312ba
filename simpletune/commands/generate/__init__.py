"""Draw pictures with any weights: generate, compare, share one base among several LoRAs.

May import encoders, report, runs, pipeline and what is below them. The server and the command line may import it.
"""
