"""``simpletune web``: how does a person start, watch and judge runs without writing JSON?

The server imports no torch. Whatever computes, trains or generates runs in a separate process, started with the verbs
of the command line, and continues when the page is closed. Files are the source of truth: a page reads a run's folder
and writes only its control file there; otherwise it writes configurations, captions, masks, uploads, histories of
edits, stars and the queue, each atomically, inside named roots. A deleted run moves to a bin beside the others.
"""
