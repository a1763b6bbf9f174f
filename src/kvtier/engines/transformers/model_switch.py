"""What an engine does when its model has changed: it goes on with the blocks of the model that is there now.

Once a request the model is looked at. When something may have changed it is named again, and with another name the
device pool and host memory are emptied, and the tiers move to the namespace of that name. Blocks of before stay in the
tiers under the name of before: they are found again when the model is again what it was.
"""

import logging

from kvtier.config import ModelIdentity
from kvtier.engines.common.block_pool import DeviceBlockPool
from kvtier.engines.transformers.connector_driver import ConnectorDriver
from kvtier.engines.transformers.identity import ModelNamer
from kvtier.engines.transformers.interrupt import DeferredInterrupt
from kvtier.engines.transformers.model_watch import ModelLook
from kvtier.errors import ModelError

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
"""Seconds for which a change waits until what was computed before it is in the tiers. Zero drops what is still on its
way; more delays the next request behind a slow tier."""


class ModelSwitch:
    """Follows the model of one engine. Used from one thread.

    Args:
        look: what the model was when it was named.
        namer: names it again.
        identity: its name at the start; None without tiers.
        pool: the device blocks.
        driver: of the tiers; None without.

    Attributes:
        epoch: the number of resets and of changes that were noticed: what was computed in another epoch is not stored.
    """

    def __init__(
        self,
        look: ModelLook,
        namer: ModelNamer,
        identity: ModelIdentity | None,
        pool: DeviceBlockPool,
        driver: ConnectorDriver | None,
    ) -> None:
        self.epoch = 0
        self._look = look
        self._namer = namer
        self._in_effect = identity
        self._pool = pool
        self._driver = driver
        self._reset_names: set[ModelIdentity] = set()

    def follow(self) -> None:
        """Go on with the model as it is now, if it has changed; called between two requests.

        Effects: switches a model that has changed to evaluation mode.
        """
        if not self._look.has_changed():
            return
        # An adapter that came meanwhile may be in training mode, and dropout would change its answers.
        self._namer.model.train(mode=False)
        # Taken before anything is read, and kept when all is done: an interrupt between leaves the change to be seen.
        look = ModelLook(self._namer.model, self._namer.unread)
        if self._driver is None:
            self._forget_device_blocks()
        else:
            self._switch(self._driver, self._name())
        self._look = look

    def learn(self) -> None:
        """Take what has changed since the last look for the model's own doing; called where only its passes ran.

        Some models keep a table that grows with the longest sequence. Parameters are never taken for that.
        """
        if not self._look.has_changed():
            return
        names = self._look.changed_names()
        if names.isdisjoint(name for name, _ in self._namer.model.named_parameters()):
            self._namer.unread |= names
            self._look = ModelLook(self._namer.model, self._namer.unread)

    def reset(self) -> None:
        """Forget every block, on the device and in every tier; a later return to this model does not find them."""
        self._forget_device_blocks()
        if self._driver is None:
            return
        if self._in_effect is None:  # its blocks are in host memory alone, and stay there
            self._driver.switch_model(None)
            return
        self._reset_names.add(self._in_effect)
        self._driver.reset()

    def _switch(self, driver: ConnectorDriver, identity: ModelIdentity | None) -> None:
        if identity is not None and identity == self._in_effect:
            return  # weights that were moved, or are again what they were
        driver.drain(DRAIN_S)
        with DeferredInterrupt():
            self._forget_device_blocks()
            driver.switch_model(identity)
            if identity in self._reset_names:
                driver.reset()  # what was stored before that reset must not be found again
            self._in_effect = identity
        logger.info("the model has changed: kvtier goes on with blocks of the weights that it has now")

    def _name(self) -> ModelIdentity | None:
        try:
            return self._namer.name_probed()
        except ModelError as error:
            logger.warning("the model has changed, and its blocks stay in host memory alone: %s", error)
            return None

    def _forget_device_blocks(self) -> None:
        self.epoch += 1
        self._pool.drop_cached()
