"""``simpletune web``: pages to start, watch and judge runs, without writing JSON.

The server imports no torch. Whatever computes, trains or draws runs in a separate process, started with the verbs of
the command line, and continues when the page is closed. Files are the source of truth: a page reads a run's folder and
writes only its control file there; otherwise it writes configurations, captions and the queue.

``app.py`` joins the pages, ``guard.py`` decides who has access, ``roots.py`` which files may be touched, ``events.py``
notifies open pages of changes. May import every package except the command line, and while the server runs none that
imports torch. Only the command line imports it.
"""
