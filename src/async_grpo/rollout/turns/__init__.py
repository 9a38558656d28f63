"""Groups with tools, environments or code of the user's between their tokens: a worker's other `Generation`.

The unit that runs is the dialogue: one completion, its turns, its tools (`dialogue`). An event loop steps all dialogues
of a worker (`groups`): each waits for tokens or for its own tools (`tools`), and the engine batches across all that
want tokens. A `rollout_func`, or an override of TRL's generation, is one function from prompts to completions and
cannot be stepped: it runs in a thread (`WholeGenerations`). An agent that asks for its tokens over HTTP is stepped on
the same loop, by `rollout.endpoint`.

Start with `Turns` in `groups`. What TRL itself does in a turn is in `dialogue`. A dialogue, and an agent's episode,
records its completion in a `Transcript`.
"""
