"""OpenAI's chat completions, answered by a worker's engine: an agent harness is trained as it is.

The unit that runs is the episode: one completion, made by one call of the agent (`harness`). A request comes in over
HTTP (`server`), is read or refused (`protocol`), and is attributed by its key. Its messages must go on from what the
episode has recorded; then only what is new is tokenised (`chat_template`), and the engine continues the recorded tokens
(`episode`). `harness` plays the episodes of a group, and makes the group of them.

Start with `Harness` in `harness`. How a setup file asks for it is in `async_grpo.setup.openai_harness`.
"""
