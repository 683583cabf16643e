"""Networks of teachers and students."""

from reincarnate.networks.build import NETWORKS, NetworkName, build_network, default_network, default_options
from reincarnate.networks.network import Network

__all__ = ["NETWORKS", "Network", "NetworkName", "build_network", "default_network", "default_options"]
