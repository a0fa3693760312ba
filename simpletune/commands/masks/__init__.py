"""Which part of a picture stands out? Masks by a saliency model."""
