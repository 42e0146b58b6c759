"""From the shape of a model to bytes, seconds, legal modes and a patch."""
