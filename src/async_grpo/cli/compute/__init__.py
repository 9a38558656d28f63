"""The commands that train or generate. They start processes and load models; the work is in `launch` and `roles`."""
