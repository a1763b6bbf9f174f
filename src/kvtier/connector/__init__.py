"""The engine-neutral connector: the scheduler half and the worker half of offloading."""

from kvtier.connector.common import ConnectorRole as ConnectorRole
from kvtier.connector.offloading_connector import OffloadingConnector as OffloadingConnector
