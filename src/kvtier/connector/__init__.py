"""What an engine drives: the scheduler half and the worker half of offloading, engine-neutral."""

from kvtier.connector.common import ConnectorRole as ConnectorRole
from kvtier.connector.offloading_connector import OffloadingConnector as OffloadingConnector
