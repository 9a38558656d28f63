"""An experiment: algorithms × families × datasets × rounds, as stages that need one another, in the places of `slots`.

What a stage has made is a folder with a manifest (`states`); everything else that is written of an experiment is a view
of those. Start with `graph`, then `states` and `experiment`. What a real stage does is in `stages`, in a process
of its own: only that one imports torch.
"""
