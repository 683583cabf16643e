"""CleanRL's PyTorch checkpoints: ``torch.save`` of a state dict (``*.cleanrl_model``).

Scripts: dqn, dqn_atari, qdagger_dqn_atari_impalacnn, ppo, ppo_atari, ppo_atari_envpool, ppo_atari_multigpu;
c51 and c51_atari (``{"model_weights": state_dict, "args": {...}}``). The Hugging Face course's ``model.pt``
is ppo's state dict with ``results.json`` beside it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from reincarnate.teachers.formats._checkpoint import Checkpoint, Hints
from reincarnate.teachers.formats._cleanrl import Layout, dense_layouts, read_arrays
from reincarnate.teachers.formats._course import results_beside
from reincarnate.teachers.formats._probe import head_of
from reincarnate.teachers.formats._torch_zip import load_tensors_and_arguments
from reincarnate.teachers.formats._weights import TORCH

NAME = "cleanrl_torch"
SUMMARY = "CleanRL in PyTorch: torch.save of a state dict"
_MAX_LAYERS = 5  # of an MLP; CleanRL's have three


def _impala_layers() -> dict[str, str]:
    names: dict[str, str] = {}
    for i in range(3):
        names[f"network.{i}.conv"] = f"trunk.sections.{i}.conv"
        for j, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
            names[f"network.{i}.res_block{j}.conv{k}"] = f"trunk.sections.{i}.blocks.{j}.conv{k + 1}"
    return names | {"network.5": "trunk.fc"}


_NATURE = {
    "network.0": "trunk.conv1",
    "network.2": "trunk.conv2",
    "network.4": "trunk.conv3",
    "network.7": "trunk.fc",
}
_DQN_ATARI = Layout("dqn_atari", "dqn", "q_values", "nature", _NATURE | {"network.9": "head"})
_QDAGGER = Layout(
    script="qdagger_dqn_atari_impalacnn",
    algorithm="dqn",
    outputs="q_values",
    network="impala",
    layers=_impala_layers() | {"network.7": "head"},
    options={"pool_padding": "torch"},
)
_DQN = Layout("dqn", "dqn", "q_values", "mlp", {}, options={"activation": "relu"})
_PPO = Layout("ppo", "ppo", "policy_logits", "mlp", {}, options={"activation": "tanh"})


def _in_sequence(name: str) -> list[str]:
    """Linear layers of a Sequential, an activation after each."""
    return [f"{name}.{2 * i}" for i in range(_MAX_LAYERS)]


def _categorical(layout: Layout, script: str) -> Layout:
    return replace(layout, script=script, algorithm="c51", support="atoms", categorical=True)


_LAYOUTS = (
    _DQN_ATARI,
    _categorical(_DQN_ATARI, "c51_atari"),
    Layout("ppo_atari", "ppo", "policy_logits", "nature", _NATURE | {"actor": "head"}, ["critic"]),
    _QDAGGER,
    replace(  # ppo_procgen's network, which people also train on Atari
        _QDAGGER,
        script="ppo with the IMPALA CNN",
        algorithm="ppo",
        outputs="policy_logits",
        layers=_impala_layers() | {"actor": "head"},
        critic=["critic"],
    ),
    *dense_layouts(_DQN, _in_sequence("network")),
    *dense_layouts(_categorical(_DQN, "c51"), _in_sequence("network")),
    *dense_layouts(_PPO, _in_sequence("actor"), _in_sequence("critic")),
)


def matches(path: Path) -> bool:
    """Whether the file is a zip archive, as ``torch.save`` writes."""
    return head_of(path).startswith(b"PK\x03\x04")


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in ``path``.

    Raises:
        UserError: damaged, unsafe, not a state dict of a script above, or at odds with its environment.
    """
    arrays, recorded = load_tensors_and_arguments(path)
    return read_arrays(
        path,
        hints,
        arrays,
        format_name=NAME,
        layouts=_LAYOUTS,
        convention=TORCH,
        recorded=recorded,
        beside=results_beside(hints),
    )
