"""Workers on other machines: one process on the server's machine (`gate`), and one actor of Ray on each other (`node`).

A far node is one worker to the server, and a server to its own workers, which are ordinary ones. `gate` claims for it
from the run's queue, `node` has a queue and weights of its own, `sending` and `receiving` carry the weights between
them, and `cluster` is the only module that imports Ray. Start with `gate`.
"""
