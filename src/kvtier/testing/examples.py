"""How many examples a test of Hypothesis draws, as a share of what the loaded profile says.

It reads no environment and loads no profile. A `max_examples` written into a
test would hide the profile's: a run that is to look harder, or a hurried one, could not say so in one place.
"""

from hypothesis import settings

USUAL_MAX_EXAMPLES = 100
"""What Hypothesis draws unless a profile says otherwise: numbers in tests are chosen beside it."""


def num_examples(usual: int) -> int:
    """Return how many examples to draw where `usual` are drawn under Hypothesis's own profile.

    Returns: `usual`, times what the loaded profile's `max_examples` is of a hundred; at least one.
    """
    return max(1, usual * settings().max_examples // USUAL_MAX_EXAMPLES)
