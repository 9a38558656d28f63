"""Lets every test beneath import the helper modules next to this file, and hypothesis take its time: cores are busy."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
