"""Which pictures and captions does ``data.source`` name, and which are unusable?"""
