"""``simpletune serve``: how are pictures generated over HTTP, in the format of Vertex AI's serving containers?

One thread runs the model (generator.py, worker.py); the others answer requests (requests.py, app.py, server.py).
"""
