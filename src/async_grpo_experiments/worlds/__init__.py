"""Worlds whose optimum is known, so that what an algorithm lacks of it is a number.

`enumerable` has every sequence and its exact value, `star` paths in graphs whose chance is known by construction,
`sentiment` a lexicon as reward. They answer the cuts of an algorithm's plan; nothing here trains.
"""
