"""The commands that train or generate, and `init`. They start processes and load models; the work is in other rooms."""
