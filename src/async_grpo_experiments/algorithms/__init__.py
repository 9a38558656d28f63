"""Value-guided decoding and preference algorithms, one file each: Q#, QSharp-HF, PITA, DPO, GRPO and GRPO-HF.

An algorithm says what completions it needs (`plan`), makes rows of token ids of them (`rows`), and trains on these
(`train`). It neither samples nor scores: anything that answers a `Cut` feeds it, a server's workers as well as a world
whose values are known. Start with `protocols`, then `qsharp`. How a trained head decodes is in the room `guidance`.
"""
