"""Every role at once: what a tier's ``test_roles.py`` inherits."""

from tests.tiering.roles.encryption import Encryption
from tests.tiering.roles.events import Events
from tests.tiering.roles.hostile import Hostile
from tests.tiering.roles.sharing import Sharing
from tests.tiering.roles.siblings import Siblings


class EveryRole(Sharing, Siblings, Hostile, Events, Encryption):
    """Encryption brings what it is tested with: tenants and expiry. Outages and crashes are in ``ServerTierSuite``."""
