"""``simpletune web``: pages to start, watch and judge runs, without writing JSON.

The server imports no torch. What computes, trains or draws runs as a process of its own, by the verbs of the command
line, and goes on when the page is closed. Files are the truth: a page reads a run's folder, and writes into it only its
control file; beside that it writes configurations, captions and the queue.

``app.py`` joins the pages, ``guard.py`` decides who may ask, ``roots.py`` which files may be touched, ``events.py``
tells open pages what has changed. May import every room but the command line, none that imports torch while the server
runs. Only the command line imports it.
"""
