"""C51 and its support, cleanba's settings and sizes, the course's model.pt, hostile files of each kind."""

from __future__ import annotations

import json
import struct
import time
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from reincarnate.errors import UserError
from reincarnate.teachers.formats import Checkpoint, Hints, detect_and_read
from reincarnate.teachers.zoo import load_teacher

import checkpoint_writers as writers

CARTPOLE = Hints("CartPole-v1")


def c51(path: Path, atoms: int = 51, low: float = -100.0, high: float = 100.0, **changes: Any) -> Path:
    """CleanRL's c51 on CartPole, its arguments or weights changed."""
    module = writers.TorchC51(writers.torch_mlp(4, (16, 8), 2 * atoms, nn.ReLU), atoms, low, high)
    arguments = writers.c51_arguments("CartPole-v1", "c51", atoms, low, high)
    weights = dict(module.state_dict()) | changes.pop("weights", {})
    torch.save({"model_weights": weights, "args": arguments | changes}, path)
    return path


def test_c51_carries_its_support_and_environment(tmp_path: Path) -> None:
    checkpoint = detect_and_read(c51(tmp_path / "x", atoms=7, low=-2, high=5))
    assert checkpoint.spec.network_options == {
        "hidden": [16, 8],
        "activation": "relu",
        "head": {"atoms": 7, "v_min": -2.0, "v_max": 5.0},
    }
    assert (checkpoint.spec.algorithm, checkpoint.spec.outputs) == ("c51", "q_values")
    assert checkpoint.spec.env.env_id == "CartPole-v1"
    assert checkpoint.assumed["env_id"] == "arguments stored in the file"
    json.dumps(checkpoint.spec.to_dict())


def test_c51_as_a_bare_state_dict_has_its_support_in_the_buffer(tmp_path: Path) -> None:
    module = writers.TorchC51(writers.torch_mlp(4, (16, 8), 22, nn.ReLU), 11, -1.0, 1.0)
    torch.save(module.state_dict(), tmp_path / "x")
    head = detect_and_read(tmp_path / "x", CARTPOLE).spec.network_options["head"]
    assert head == {"atoms": 11, "v_min": -1.0, "v_max": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_atoms": 21}, r"atoms is a support of 51 atoms from -100 to 100, its arguments say 21 atoms"),
        ({"v_max": 50}, r"its arguments say 51 atoms from -100 to 50$"),
        ({"v_min": 200}, r"args: no support of a return distribution: n_atoms=51, v_min=200"),
        ({"v_min": float("nan")}, r"args: no support of a return distribution"),
        ({"n_atoms": True}, r"args: no support of a return distribution: n_atoms=True"),
        ({"n_atoms": "51"}, r"args: no support of a return distribution"),
        ({"seed": {"deep": 1}}, r"args: 'seed' holds a dict, no text or number"),
        ({"seed": torch.zeros(1)}, r"args: 'seed' holds a Tensor, no text or number"),
        ({"run_name": "x" * 100_000}, r"args: 'run_name' is longer than 65536 characters"),
        ({"weights": {"atoms": torch.ones(51)}}, r"atoms: the values are not evenly spaced from low to high"),
        ({"weights": {"atoms": torch.zeros(51).long()}}, r"atoms: expected \[atoms\] values, found \[51\]"),
        ({"weights": {"atoms": torch.full((51,), torch.nan)}}, r"atoms: 51 of 51 weights are NaN"),
        (
            {"weights": {"network.4.bias": torch.zeros(101)}},
            r"network\.4\.bias: expected \[102\], found \[101\]",
        ),
        (
            {"weights": {"network.4.weight": torch.zeros(100, 8)}},
            r"network\.4\.weight: 100 outputs are not 51 atoms for each action",
        ),
    ],
)
def test_a_support_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as got:
        detect_and_read(c51(tmp_path / "x", **changes), CARTPOLE)
    assert str(got.value).isprintable()


def cleanba(
    path: Path,
    arguments: dict[str, Any],
    actions: int = 18,
    channels: tuple[int, ...] = (2, 2, 2),
    hiddens: tuple[int, ...] = (8,),
    extra_inputs: int = 0,
) -> Path:
    """cleanba's agent on 84x84 images, tiny."""
    pytest.importorskip("flax")
    trunk = writers.flax_impala(None, channels, hiddens)
    obs, features = np.zeros((1, 4, 84, 84), np.uint8), np.zeros((1, hiddens[-1] + extra_inputs), np.float32)
    parts = [
        writers.flax_params(trunk, obs, 1),
        writers.flax_params(writers.flax_dense(actions), features, 2),
        writers.flax_params(writers.flax_dense(1), features, 3),
    ]
    return writers.save_cleanba(path, arguments, parts)


MACHADO = {"sticky_probability": 0.25, "episodic_life": False, "noop_max": 1, "full_action_set": True}
CLEANRL = {"sticky_probability": 0.0, "episodic_life": True, "noop_max": 30, "full_action_set": False}


@pytest.mark.parametrize(
    ("script", "changes", "actions", "expected"),
    [
        ("cleanba_ppo", {"channels": [2, 2, 2], "hiddens": [8]}, 18, MACHADO),
        ("cleanba_impala_a0_l1_d4_cpu46", {}, 18, MACHADO),
        ("my_run", {"channels": [2, 2, 2], "hiddens": [8]}, 18, MACHADO),
        ("cleanba_impala_envpool_machado_atari_wrapper_a0_l1_d4", {}, 18, MACHADO),
        ("ppo_atari_envpool_async_jax_scan_impalanet_machado", {}, 18, MACHADO),
        ("sebulba_ppo_envpool", {}, 18, MACHADO),  # it had both settings; the outputs tell which
        ("sebulba_ppo_envpool", {}, 4, CLEANRL),
        ("cleanba_ppo_envpool_impala_atari_wrapper", {}, 4, CLEANRL),
        ("ppo_atari_envpool_xla_jax_scan", {}, 4, CLEANRL),
    ],
)
def test_the_script_tells_how_the_games_were_set_up(
    tmp_path: Path, script: str, changes: dict[str, Any], actions: int, expected: dict[str, Any]
) -> None:
    path = cleanba(
        tmp_path / "agent.cleanrl_model", writers.cleanba_arguments("Breakout-v5", script, **changes), actions
    )
    checkpoint = detect_and_read(path, Hints(exp_name="renamed"))
    env = checkpoint.spec.env
    assert {name: getattr(env, name) for name in expected} == expected
    assert (env.num_actions, env.obs_shape, env.max_agent_steps) == (actions, (4, 84, 84), 27_000)
    assert env.fire_reset
    assert env.reward_clip
    assert script in checkpoint.assumed["sticky_probability"]
    assert checkpoint.spec.algorithm == ("impala" if "cleanba_impala" in script else "ppo")
    assert checkpoint.spec.outputs == "policy_logits"


def test_a_game_with_eighteen_actions_of_its_own_is_still_machados(tmp_path: Path) -> None:
    path = cleanba(tmp_path / "x", writers.cleanba_arguments("Seaquest-v5", "cleanba_ppo"))
    env = detect_and_read(path).spec.env
    assert (env.env_id, env.num_actions, env.sticky_probability) == ("Seaquest-v5", 18, 0.25)


def test_a_scripts_name_cannot_write_on_the_terminal(tmp_path: Path) -> None:
    arguments = writers.cleanba_arguments("Breakout-v5", "cleanba_ppo\x1b[2J\n" + "x" * 9999)
    reason = detect_and_read(cleanba(tmp_path / "x", arguments)).assumed["noop_max"]
    assert reason.isprintable()
    assert len(reason) < 200


def test_arguments_that_contradict_the_weights_are_refused(tmp_path: Path) -> None:
    arguments = writers.cleanba_arguments("Breakout-v5", "cleanba_ppo", channels=[2, 2, 2], hiddens=[9])
    with pytest.raises(UserError, match=r"x: args: hiddens=\[9\], the weights have \[8\]"):
        detect_and_read(cleanba(tmp_path / "x", arguments))
    arguments |= {"channels": [2, 2], "hiddens": [8]}
    with pytest.raises(UserError, match=r"x: args: channels=\[2, 2\], the weights have \[2, 2, 2\]"):
        detect_and_read(cleanba(tmp_path / "x", arguments))


def test_policies_that_take_more_than_observations_are_refused_in_words(tmp_path: Path) -> None:
    script = "cleanba_impala_envpool_machado_atari_wrapper_last_action_reward"
    path = cleanba(tmp_path / "x", writers.cleanba_arguments("Breakout-v5", script), extra_inputs=19)
    with pytest.raises(UserError, match=r"27 inputs are 8 features, the last of 18 actions and its reward"):
        detect_and_read(path)


def test_procgen_is_refused_in_words(tmp_path: Path) -> None:
    arguments = writers.cleanba_arguments("BigfishEasy-v0", "cleanba_ppo_envpool_procgen")
    with pytest.raises(UserError, match=r"Procgen's colour images cannot be a teacher's here"):
        detect_and_read(cleanba(tmp_path / "x", arguments, 15))


def agent(path: Path, features: int = 4, actions: int = 2, hidden: tuple[int, int] = (64, 64)) -> Path:
    networks = (writers.torch_mlp(features, hidden, size, nn.Tanh) for size in (actions, 1))
    return writers.save_agent(path, writers.Agent(*networks))


def test_the_course_repository_is_read_by_content(tmp_path: Path) -> None:
    folder = tmp_path / "ppo-from-scratch"
    agent(folder / "unit8" / "model.pt", hidden=(32, 16))
    (folder / "unit8" / "optimizer.pt").write_bytes(b"no policy")
    results = {"env_id": "CartPole-v1", "mean_reward": 123.5, "std_reward": 4.5, "n_evaluation_episodes": 10}
    (folder / "unit8" / "results.json").write_text(json.dumps(results))
    teacher = load_teacher(str(folder))
    assert teacher.card.file == "unit8/model.pt"
    assert teacher.spec.env.env_id == "CartPole-v1"
    assert teacher.card.assumed["env_id"] == "results.json beside it"
    reported = teacher.card.reported
    assert reported is not None
    assert (reported.mean, reported.std, reported.n, reported.act) == (123.5, 4.5, 10, "sample")
    assert teacher.spec.network_options == {"hidden": [32, 16], "activation": "tanh"}


@pytest.mark.parametrize(
    "content", ["", "[1]", "[" * 60_000, '{"env_id": 3}', '{"env_id": ""}', '{"env_id"', "\0"]
)
def test_results_that_say_nothing_leave_it_to_the_name(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "ppo-CartPole-v1-unit8"
    agent(folder / "model.pt")
    (folder / "results.json").write_text(content)
    teacher = load_teacher(str(folder))
    assert teacher.card.assumed["env_id"] == "the folder name 'ppo-CartPole-v1-unit8'"
    assert teacher.card.reported is None


def test_a_deeper_and_a_shallower_network_are_read_too(tmp_path: Path) -> None:
    def layers(sizes: list[int]) -> nn.Sequential:
        modules: list[nn.Module] = []
        for before, after in pairwise(sizes):
            modules += [nn.Linear(before, after), nn.Tanh()]
        return nn.Sequential(*modules[:-1])

    obs = torch.randn(20, 4)
    for hidden in ([9], [9, 8, 7], [9, 8, 7, 6]):
        saved = writers.Agent(layers([4, *hidden, 2]), layers([4, *hidden, 1]))
        checkpoint = detect_and_read(writers.save_agent(tmp_path / "model.pt", saved), CARTPOLE)
        assert checkpoint.spec.network_options["hidden"] == hidden
        network = checkpoint.spec.build()
        network.load_state_dict(checkpoint.state_dict)
        with torch.no_grad():
            torch.testing.assert_close(network(obs), saved(obs))


class Policy(nn.Module):
    """The course's Reinforce unit saves such a module whole."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 2)


@pytest.mark.filterwarnings("ignore")
def test_whole_modules_and_programs_are_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(Policy(), path)
    with pytest.raises(UserError, match=r"import \S+Policy, for it holds a whole module .*state_dict\(\)"):
        detect_and_read(path, CARTPOLE)
    torch.jit.trace(Policy().fc1, torch.zeros(1, 4)).save(str(path))
    with pytest.raises(UserError, match=r"TorchScript program .*which is code"):
        detect_and_read(path, CARTPOLE)


def with_pickle(path: Path, pickled: bytes) -> Path:
    """A torch archive with this pickle and nothing else."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
        archive.writestr("x/version", b"3\n")
    return path


SHARED_TUPLES = b"\x80\x02}(K\x01q\x00" + b"".join(  # each holds the one before twice: 2**60 to hash
    b"0h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(60)
)


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (SHARED_TUPLES + b"K\x01u.", r"tuples in tuples, \d+ values in one"),
        (b"\x80\x02}(K\x01" + b"\x85" * 100_000 + b"K\x01u.", r"tuples in tuples, 1001 values in one"),
        (b"\x80\x02](" + b"N" * 2_000_000 + b"e.", r"a data\.pkl of 2000006 bytes names no weights"),
        (b"\x80\x02" + b"0" * 10 + b".", r"is damaged: its data\.pkl is no pickle"),
        (b"\x80\x02h\x05.", r"is damaged: its data\.pkl is no pickle"),
        (b"\x80\x02X" + struct.pack("<I", 2**31 - 1) + b"x.", r"is damaged: its data\.pkl is no pickle"),
        (b"\x80\x02}X\x04\x00\x00\x00argscos\nsystem\n(X\x04\x00\x00\x00truetRs.", r"to import os\.system"),
    ],
)
def test_hostile_pickles_are_refused_at_once(tmp_path: Path, pickled: bytes, message: str) -> None:
    started = time.process_time()
    with pytest.raises(UserError, match=message) as got:
        detect_and_read(with_pickle(tmp_path / "x", pickled), CARTPOLE)
    assert str(got.value).isprintable()
    assert time.process_time() - started < 20  # seconds; hashing alone would take years


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (str(self.target), "w")


def test_code_among_the_arguments_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x is not opened: it asks to import"):
        detect_and_read(c51(tmp_path / "x", seed=Touch(tmp_path / "ran")), CARTPOLE)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("arguments", [[], 3, None, "text", {"n_atoms": {"0": 1}}])
def test_flax_arguments_of_another_kind_are_told(tmp_path: Path, arguments: Any) -> None:
    serialization = pytest.importorskip("flax.serialization")
    params = writers.flax_params(writers.flax_dense(16, 8, 22), np.zeros((1, 4), np.float32), 0)
    path = tmp_path / "x.cleanrl_model"
    tree = {"model_weights": params, "args": arguments}
    path.write_bytes(serialization.msgpack_serialize(tree))
    with pytest.raises(UserError, match=r"args: expected a map of arguments|n_atoms, v_min and v_max") as got:
        detect_and_read(path, CARTPOLE)
    assert str(got.value).isprintable()


def outputs_of(checkpoint: Checkpoint) -> int:
    return checkpoint.spec.build("meta").head.out_features


def test_a_flax_support_of_absurd_size_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    params = writers.flax_params(writers.flax_dense(16, 8, 22), np.zeros((1, 4), np.float32), 0)
    arguments = writers.c51_arguments("CartPole-v1", "c51_jax", 11, -1, 1)
    path = writers.save_flax(tmp_path / "x", {"model_weights": params, "args": arguments})
    assert outputs_of(detect_and_read(path)) == 22
    for atoms in (2**40, 10, 23):
        changed = {"model_weights": params, "args": arguments | {"n_atoms": atoms}}
        with pytest.raises(UserError, match=rf"Dense_2/kernel: 22 outputs are not {atoms} atoms"):
            detect_and_read(writers.save_flax(path, changed))
