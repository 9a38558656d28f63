"""Environments for setup files: `environment_factory=SearchEnv`, also in plain TRL.

`search` has the environment, its tools and the passages that it finds, `facts` a few hundred generated ones.
Rewards for what it is asked are in `async_grpo.rewards.questions`. How tools run is the matter of
`async_grpo.rollout.turns`. `tags` has calls of tools as text, for models whose chat template knows no tools.

`OpenAIHarness` takes an agent that is written against OpenAI's API; `async_grpo.rollout.endpoint` answers it.
`verifiers` plays the environments of that package, by the `conversations` of a `rollout_func`; `openenv` makes tools
of what a server of OpenEnv takes.
"""

from async_grpo.envs.facts import Fact, generated_facts
from async_grpo.envs.search import Passages, SearchEnv
from async_grpo.envs.tags import with_tags
from async_grpo.setup.openai_harness import Endpoint, OpenAIHarness

__all__ = ["Endpoint", "Fact", "OpenAIHarness", "Passages", "SearchEnv", "generated_facts", "with_tags"]
