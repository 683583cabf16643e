"""CleanRL's PyTorch checkpoints: ``torch.save`` of a state dict (``*.cleanrl_model``).

Scripts: dqn, dqn_atari, qdagger_dqn_atari_impalacnn, ppo, ppo_atari, ppo_atari_envpool.
"""

from __future__ import annotations

from pathlib import Path

from reincarnate.teachers.formats._checkpoint import Checkpoint, Hints
from reincarnate.teachers.formats._cleanrl import Layout, read_arrays
from reincarnate.teachers.formats._probe import head_of
from reincarnate.teachers.formats._torch_zip import load_tensors
from reincarnate.teachers.formats._weights import TORCH

NAME = "cleanrl_torch"
SUMMARY = "CleanRL in PyTorch: torch.save of a state dict"


def _impala_layers() -> dict[str, str]:
    names: dict[str, str] = {}
    for i in range(3):
        names[f"network.{i}.conv"] = f"trunk.sections.{i}.conv"
        for j, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
            names[f"network.{i}.res_block{j}.conv{k}"] = f"trunk.sections.{i}.blocks.{j}.conv{k + 1}"
    return names | {"network.5": "trunk.fc", "network.7": "head"}


_NATURE = {
    "network.0": "trunk.conv1",
    "network.2": "trunk.conv2",
    "network.4": "trunk.conv3",
    "network.7": "trunk.fc",
}
_LAYOUTS = (
    Layout("dqn_atari", "dqn", "q_values", "nature", _NATURE | {"network.9": "head"}),
    Layout("ppo_atari", "ppo", "policy_logits", "nature", _NATURE | {"actor": "head"}, ["critic"]),
    Layout(
        script="qdagger_dqn_atari_impalacnn",
        algorithm="dqn",
        outputs="q_values",
        network="impala",
        layers=_impala_layers(),
        options={"pool_padding": "torch"},
    ),
    Layout(
        script="dqn",
        algorithm="dqn",
        outputs="q_values",
        network="mlp",
        layers={"network.0": "trunk.layers.0", "network.2": "trunk.layers.1", "network.4": "head"},
        options={"activation": "relu"},
    ),
    Layout(
        script="ppo",
        algorithm="ppo",
        outputs="policy_logits",
        network="mlp",
        layers={"actor.0": "trunk.layers.0", "actor.2": "trunk.layers.1", "actor.4": "head"},
        critic=["critic.0", "critic.2", "critic.4"],
        options={"activation": "tanh"},
    ),
)


def matches(path: Path) -> bool:
    """Whether the file is a zip archive, as ``torch.save`` writes."""
    return head_of(path).startswith(b"PK\x03\x04")


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in ``path``.

    Raises:
        UserError: damaged, unsafe, not a state dict of a script above, or at odds with its environment.
    """
    arrays = load_tensors(path)
    return read_arrays(path, hints, arrays, format_name=NAME, layouts=_LAYOUTS, convention=TORCH)
