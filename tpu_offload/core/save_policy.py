"""Which computed tokens of a request are worth saving."""

import abc
from typing import final


class SavePolicy(abc.ABC):
    """Says how far into a request saving goes.

    Called by the scheduler when the engine names a request; the answer stands until it names it again.
    """

    @abc.abstractmethod
    def num_tokens_to_save(self, *, num_prompt_tokens: int, num_computed_tokens: int) -> int:
        """Leading tokens that should be in the host tier by now; at most `num_computed_tokens`."""


@final
class SavePrompt(SavePolicy):
    """Saves prompts only. Generated tokens are saved when a later prompt contains them."""

    def num_tokens_to_save(self, *, num_prompt_tokens: int, num_computed_tokens: int) -> int:
        """See the base class."""
        return min(num_prompt_tokens, num_computed_tokens)


@final
class SaveAll(SavePolicy):
    """Saves generated tokens as well."""

    def num_tokens_to_save(self, *, num_prompt_tokens: int, num_computed_tokens: int) -> int:
        """See the base class."""
        return num_computed_tokens
