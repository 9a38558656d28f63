"""A run before it is one: the trainer's facts, its arithmetic and its memory. Nothing is started."""
