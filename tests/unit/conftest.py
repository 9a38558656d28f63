"""Lets every test beneath import the helper modules next to this file."""
