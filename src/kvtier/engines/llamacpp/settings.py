"""The settings of the front; those of host memory and tiers are kvtier's own."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvtier.settings import absolute_path, choice, seconds, setting, whole


class SaveWhen(Enum):
    """When a conversation is saved."""

    IDLE = "idle"
    EACH = "each"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """What ``kvtier llama`` takes from the section ``llama`` of its configuration file."""

    block_tokens: int = field(
        default=64,
        metadata=setting(
            whole(1, 4096),
            "chats share blocks; 256 tokens are seconds of computing on a CPU, and fewer than 64 are more to look up",
            unit="tokens",
        ),
    )
    idle_s: float = field(
        default=5.0,
        metadata=setting(
            seconds,
            "a save waits for a running batch and delays the next one, so it waits until a chat pauses",
            unit="s",
        ),
    )
    save: SaveWhen = field(
        default=SaveWhen.IDLE,
        metadata=setting(
            choice(SaveWhen),
            "`idle`: when a slot has been idle, before it is overwritten and at the end; `each`: after each request",
        ),
    )
    end_s: float = field(
        default=30.0,
        metadata=setting(
            seconds, "for the last saves when the front ends; a batch that runs must end first", unit="s"
        ),
    )
    model: Path | None = field(
        default=None,
        metadata=setting(
            absolute_path,
            "the weights of an attached server, where the path that it names is not this machine's",
        ),
    )

    @property
    def saves_each(self) -> bool:
        """Whether each request is saved at its end."""
        return self.save is SaveWhen.EACH
