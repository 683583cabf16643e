"""Networks of teachers and students."""

from reincarnate.networks.build import NETWORKS, NetworkName, build_network, default_network, default_options
from reincarnate.networks.muesli import (
    ModelOutputs,
    MuesliNetwork,
    RootOutputs,
    acting_network,
    average_,
    build_muesli_network,
    muesli_options,
    target_of,
)
from reincarnate.networks.network import Network

__all__ = [
    "NETWORKS",
    "ModelOutputs",
    "MuesliNetwork",
    "Network",
    "NetworkName",
    "RootOutputs",
    "acting_network",
    "average_",
    "build_muesli_network",
    "build_network",
    "default_network",
    "default_options",
    "muesli_options",
    "target_of",
]
