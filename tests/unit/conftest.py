"""Lets every test beneath import the helper modules beside this file."""
