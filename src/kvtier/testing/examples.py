"""The number of examples that a Hypothesis test draws, as a share of the loaded profile's.

A fixed `max_examples` in a test would hide the profile's, so a longer or shorter run could not be set in one place.
"""

from hypothesis import settings

USUAL_MAX_EXAMPLES = 100
"""What Hypothesis draws by default; the numbers in tests are relative to it."""


def num_examples(usual: int) -> int:
    """Return how many examples to draw where a test draws `usual` under Hypothesis's own profile.

    Returns: `usual`, times the loaded profile's `max_examples` over a hundred; at least one.
    """
    return max(1, usual * settings().max_examples // USUAL_MAX_EXAMPLES)
