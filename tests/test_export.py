"""Exported files: CleanRL's networks load them strictly and play the same; our readers get them back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from reincarnate.cli import main
from reincarnate.envs import env_spec, make_env
from reincarnate.errors import UserError
from reincarnate.teachers.export import EXPORT_FORMATS, export_teacher
from reincarnate.teachers.formats import _msgpack_write
from reincarnate.teachers.teacher import Reported, Teacher, TeacherCard, TeacherSpec
from reincarnate.teachers.zoo import load_teacher

import checkpoint_writers as writers
from paths import SHARED_CHECKPOINTS, needs_checkpoints

OWN = SHARED_CHECKPOINTS / "own"
TOLERANCE = 1e-4
C51_ATARI = {"atoms": 51, "v_min": -10.0, "v_max": 10.0}
C51_VECTOR = {"atoms": 101, "v_min": -100.0, "v_max": 100.0}
NATURE: dict[str, Any] = {"hidden": 512}
IMPALA: dict[str, Any] = {"hidden": 256, "channels": [16, 32, 32], "pool_padding": "torch"}
Q_MLP: dict[str, Any] = {"hidden": [120, 84], "activation": "relu"}
ACTOR_MLP: dict[str, Any] = {"hidden": [64, 64], "activation": "tanh"}


def make_teacher(
    network: str, options: dict[str, Any], outputs: str = "q_values", env_id: str | None = None, **env: Any
) -> Teacher:
    """A teacher with random weights, large enough that its outputs differ by observation."""
    spec = TeacherSpec(
        env_spec(env_id or ("CartPole-v1" if network == "mlp" else "Breakout-v5"), **env),
        outputs,  # type: ignore[arg-type]
        network,
        options,
        "dqn" if outputs == "q_values" else "ppo",
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        state = {name: value * 1.5 for name, value in spec.build().state_dict().items()}
    if "head" in options:  # distributions that are nearly uniform have nearly one mean
        state["head.weight"] *= 10
    card = TeacherCard("a-teacher", "a-teacher", None, "x", "ab" * 32, "native", Reported(5.0, "card"))
    return Teacher(spec, card, state)


#: script -> the teacher that it fits
ATARI: dict[str, Callable[[], Teacher]] = {
    "dqn_atari": lambda: load_teacher("bundled/Breakout-dqn"),
    "c51_atari": lambda: make_teacher("nature", NATURE | {"head": C51_ATARI}),
    "qdagger_dqn_atari_impalacnn": lambda: make_teacher("impala", IMPALA),
    "ppo_atari": lambda: make_teacher("nature", NATURE, "policy_logits"),
}
VECTOR: dict[str, Callable[[], Teacher]] = {
    "dqn": lambda: load_teacher("bundled/CartPole-dqn"),
    "c51": lambda: make_teacher("mlp", Q_MLP | {"head": C51_VECTOR}),
    "ppo": lambda: make_teacher("mlp", ACTOR_MLP, "policy_logits"),
}
JAX: dict[str, Callable[[], Teacher]] = {
    "dqn_atari_jax": ATARI["dqn_atari"],
    "c51_atari_jax": ATARI["c51_atari"],
    "qdagger_dqn_atari_jax_impalacnn": lambda: make_teacher("impala", IMPALA | {"pool_padding": "same"}),
    "ppo_atari_envpool_xla_jax_scan": ATARI["ppo_atari"],
    "dqn_jax": VECTOR["dqn"],
    "c51_jax": VECTOR["c51"],
}
TORCH = ATARI | VECTOR


@pytest.fixture(scope="module")
def observations() -> dict[str, Tensor]:
    """Real observations of random play, by kind."""
    seen = {}
    for kind, env_id, steps in (("atari", "Breakout-v5", 24), ("vector", "CartPole-v1", 40)):
        spec, rng = env_spec(env_id), np.random.default_rng(0)
        with make_env(spec, 4, seed=1) as env:
            first = [torch.as_tensor(env.reset().obs)]
            acted = [
                torch.as_tensor(env.step(rng.integers(0, spec.num_actions, 4)).obs) for _ in range(steps)
            ]
        seen[kind] = torch.cat([each.clone() for each in first + acted][:: 4 if kind == "atari" else 1])
    return seen


def assert_same_policy(ours: Tensor, theirs: npt.NDArray[Any]) -> None:
    assert ours.shape == theirs.shape
    assert float(ours.std(dim=0).max()) > 1e-3  # outputs that do not depend on the observation prove nothing
    np.testing.assert_allclose(ours.numpy(), theirs, atol=TOLERANCE, rtol=0)


def torch_network(script: str, state: dict[str, Tensor], args: dict[str, Any]) -> nn.Module:
    """CleanRL's network for the script, filled strictly."""
    atoms = args.get("n_atoms", 1)
    networks: dict[str, Callable[[], nn.Module]] = {
        "dqn_atari": lambda: writers.TorchQNetwork(writers.torch_nature(4, 84, 84, 4)),
        "c51_atari": lambda: writers.torch_nature(4, 84, 84, 4 * atoms),
        "qdagger_dqn_atari_impalacnn": lambda: writers.TorchQNetwork(writers.torch_impala(4, 84, 4)),
        "ppo_atari": lambda: writers.torch_agent_atari(4),
        "dqn": lambda: writers.TorchQNetwork(writers.torch_mlp(4, (120, 84), 2, nn.ReLU)),
        "c51": lambda: writers.torch_mlp(4, (120, 84), 2 * atoms, nn.ReLU),
        "ppo": lambda: writers.torch_agent(4, 2),
    }
    network = networks[script]()
    if isinstance(network, nn.Sequential):
        actions = 4 if script == "c51_atari" else 2
        network = writers.TorchC51Agent(network, actions, atoms, args["v_min"], args["v_max"])
    network.load_state_dict(state, strict=True)
    return network.eval()


@pytest.mark.parametrize("script", TORCH)
def test_cleanrls_pytorch_networks_load_it_strictly_and_play_the_same(
    script: str, observations: dict[str, Tensor], tmp_path: Path
) -> None:
    teacher = TORCH[script]()
    exported = export_teacher(teacher, "cleanrl", tmp_path)
    assert exported.path == tmp_path / f"{script}.cleanrl_model"
    assert exported.script == script
    loaded = torch.load(exported.path, weights_only=True)
    state, args = (loaded["model_weights"], loaded["args"]) if "args" in loaded else (loaded, {})
    obs = observations["atari" if script in ATARI else "vector"]
    with torch.no_grad():
        outputs = torch_network(script, state, args)(obs / 255.0 if script in ATARI else obs)
    if isinstance(outputs, tuple):
        outputs, values = outputs
        assert not values.any()
        assert "critic is written as zeros" in exported.notes[0]
    assert_same_policy(teacher.outputs(obs), outputs.numpy())


def flax_outputs(script: str, path: Path, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What CleanRL's JAX network gives for a file that flax itself restores into its parameters."""
    import flax.serialization

    data = path.read_bytes()
    if script.startswith("ppo"):
        trunk, actor, critic = writers.flax_nature(None), writers.flax_dense(4), writers.flax_dense(1)
        features = np.zeros((1, 512), np.float32)
        target = [writers.flax_params(trunk, obs, 1)]
        target += [writers.flax_params(head, features, 1) for head in (actor, critic)]
        args, params = flax.serialization.from_bytes((None, tuple(target)), data)
        assert args["exp_name"] == script
        hidden = trunk.apply(params[0], obs)
        assert not np.any(critic.apply(params[2], hidden))
        return np.asarray(actor.apply(params[1], hidden))
    if script.startswith("c51"):
        content = flax.serialization.from_bytes(None, data)
        args, actions = content["args"], 4 if "atari" in script else 2
        outputs = actions * args["n_atoms"]
        module = writers.flax_nature(outputs) if "atari" in script else writers.flax_dense(120, 84, outputs)
        logits = module.apply(content["model_weights"], obs)
        support = (args["n_atoms"], args["v_min"], args["v_max"])
        return np.asarray(writers.flax_expected_values(logits, actions, *support))
    modules = {
        "dqn_atari_jax": lambda: writers.flax_nature(4),
        "qdagger_dqn_atari_jax_impalacnn": lambda: writers.flax_impala(4),
        "dqn_jax": lambda: writers.flax_dense(120, 84, 2),
    }
    module = modules[script]()
    params = flax.serialization.from_bytes(writers.flax_params(module, obs, 1), data)
    return np.asarray(module.apply(params, obs))


@pytest.mark.parametrize("script", JAX)
def test_cleanrls_jax_networks_load_it_and_play_the_same(
    script: str, observations: dict[str, Tensor], tmp_path: Path
) -> None:
    pytest.importorskip("flax")
    teacher = JAX[script]()
    exported = export_teacher(teacher, "cleanrl-jax", tmp_path)
    assert exported.path == tmp_path / f"{script}.cleanrl_model"
    obs = observations["vector" if script in ("dqn_jax", "c51_jax") else "atari"]
    assert_same_policy(teacher.outputs(obs), flax_outputs(script, exported.path, obs.numpy()))


def _name(value: object) -> str | None:
    """No addresses: every test process must see the same names."""
    return value if isinstance(value, str) else ""


ROUND_TRIPS = [
    *(("cleanrl", script, build) for script, build in TORCH.items()),
    *(("cleanrl-jax", script, build) for script, build in JAX.items()),
    *(
        ("native", script, build)
        for script, build in (TORCH | {"same": JAX["qdagger_dqn_atari_jax_impalacnn"]}).items()
    ),
]


@pytest.mark.parametrize(("format", "script", "build"), ROUND_TRIPS, ids=_name)
def test_our_own_reader_gets_every_weight_back(
    format: str, script: str, build: Callable[[], Teacher], tmp_path: Path
) -> None:
    teacher = build()
    exported = export_teacher(teacher, format, tmp_path)
    again = load_teacher(str(exported.path), env_id=teacher.spec.env.env_id)
    ours, theirs = teacher.network.state_dict(), again.network.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert (again.spec.outputs, again.spec.network) == (teacher.spec.outputs, teacher.spec.network)
    assert again.spec.env == teacher.spec.env
    assert again.spec.network_options.get("head") == teacher.spec.network_options.get("head")


def test_native_keeps_everything(tmp_path: Path) -> None:
    """Also what no CleanRL script has: normalised observations, three layers, sticky actions, the claim."""
    normalise = {"epsilon": 1e-8, "clip": 10.0}
    for teacher in (
        make_teacher("mlp", {"hidden": [8, 8, 8], "activation": "tanh", "normalise": normalise}),
        make_teacher("nature", NATURE | {"neck": [32]}, sticky_probability=0.25),
    ):
        again = load_teacher(str(export_teacher(teacher, "native", tmp_path, force=True).path))
        assert again.spec == teacher.spec
        assert again.card.reported == teacher.card.reported
    assert b"a-teacher" not in (tmp_path / "teacher.safetensors").read_bytes()


@needs_checkpoints
def test_the_flax_file_is_byte_for_byte_what_flax_wrote(tmp_path: Path) -> None:
    original = OWN / "Breakout-dqn" / "dqn_atari_jax.cleanrl_model"
    exported = export_teacher(str(original), "cleanrl-jax", tmp_path / "copy.cleanrl_model")
    assert exported.path.read_bytes() == original.read_bytes()


def test_trees_are_written_as_flax_writes_them() -> None:
    serialization = pytest.importorskip("flax.serialization")
    rng = np.random.default_rng(0)
    tree = {
        "a": [rng.standard_normal((2, 3)).astype(np.float32), {"b": None, "c": True, "d": "é", "e": -1.5}],
        "f": rng.integers(0, 9, (3, 1, 2)).transpose(2, 0, 1),  # not contiguous
    }
    assert _msgpack_write.to_bytes(tree) == serialization.to_bytes(tree)
    with pytest.raises(TypeError, match="cannot write a set"):
        _msgpack_write.to_bytes({"x": {1}})
    with pytest.raises(ValueError, match="written in chunks"):
        _msgpack_write.to_bytes({"x": np.broadcast_to(np.float32(0), (2**28 + 1,))})


MISFITS = {
    "three hidden layers": (
        lambda: make_teacher("mlp", {"hidden": [64, 64, 64], "activation": "relu"}),
        "cleanrl",
        r"hidden is \[64, 64, 64\] \(the script's is \[120, 84\]\); export it as native",
    ),
    "another activation": (
        lambda: make_teacher("mlp", {"hidden": [120, 84], "activation": "tanh"}),
        "cleanrl-jax",
        r"CleanRL's dqn_jax: activation is tanh \(the script's is relu\)",
    ),
    "normalised observations": (
        lambda: make_teacher("mlp", ACTOR_MLP | {"normalise": {"clip": 10.0}}, "policy_logits"),
        "cleanrl",
        "it normalises its observations",
    ),
    "pooling of JAX": (
        JAX["qdagger_dqn_atari_jax_impalacnn"],
        "cleanrl",
        r"pool_padding is same \(the script's is torch\); export it as --format cleanrl-jax or native",
    ),
    "pooling of PyTorch": (
        ATARI["qdagger_dqn_atari_impalacnn"],
        "cleanrl-jax",
        r"pool_padding is torch .*--format cleanrl or native",
    ),
    "a neck": (lambda: make_teacher("nature", NATURE | {"neck": [32]}), "cleanrl", r"neck is \[32\]"),
    "padding of Dopamine": (
        lambda: make_teacher("nature", NATURE | {"padding": "same"}),
        "cleanrl-jax",
        "padding is same",
    ),
    "small images": (
        lambda: make_teacher("nature", NATURE, obs_shape=(4, 64, 64)),
        "cleanrl",
        r"observations are \[4, 64, 64\] \(the script's are \[4, 84, 84\]\)",
    ),
    "all actions": (
        lambda: make_teacher("nature", NATURE, full_action_set=True),
        "cleanrl",
        r"it has 18 actions \(the script plays Breakout-v5 with 4\)",
    ),
    "no such script": (
        lambda: make_teacher("impala", IMPALA, "policy_logits"),
        "cleanrl",
        "CleanRL has no PyTorch script with the impala network and policy logits; export it as native",
    ),
    "no such script in JAX": (
        VECTOR["ppo"],
        "cleanrl-jax",
        "no JAX script with the mlp network and policy logits",
    ),
    "a categorical impala": (
        lambda: make_teacher("impala", IMPALA | {"head": C51_ATARI}),
        "cleanrl",
        "the impala network and a categorical head",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_refused_in_one_line_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    build, format, message = MISFITS[kind]
    with pytest.raises(UserError, match=message) as caught:
        export_teacher(build(), format, tmp_path / "out")
    assert str(caught.value).startswith(f"a-teacher cannot be exported as {format}: ")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_another_environment_setting_is_said(tmp_path: Path) -> None:
    teacher = make_teacher("nature", NATURE, sticky_probability=0.25)
    notes = export_teacher(teacher, "cleanrl", tmp_path).notes
    assert notes == ("CleanRL's dqn_atari plays with sticky_probability=0.0, this teacher with 0.25",)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["teachers", "export", *arguments])


def test_command_line(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    done = invoke("bundled/CartPole-dqn", "--format", "cleanrl-jax", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{out / 'dqn_jax.cleanrl_model'} (CleanRL's dqn_jax, CartPole-v1)\n"
    file = out / "dqn_jax.cleanrl_model"
    before = file.read_bytes()
    assert load_teacher(str(file), env_id="CartPole-v1").card.format == "cleanrl_flax"
    refused = invoke("bundled/CartPole-dqn", "--format", "native", "--out", str(file.parent / "a.zip"))
    assert refused.exit_code == 2
    assert "a native file ends in .safetensors" in refused.stderr
    file.write_bytes(b"mine")
    refused = invoke("bundled/CartPole-dqn", "--format", "cleanrl-jax", "--out", str(file))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert "already exists; choose another --out, or pass --force" in refused.stderr
    assert file.read_bytes() == b"mine"
    forced = invoke(
        "bundled/CartPole-dqn", "--format", "cleanrl-jax", "--out", str(file), "--force", "--json"
    )
    assert json.loads(forced.stdout) == {
        "path": str(file),
        "format": "cleanrl-jax",
        "script": "dqn_jax",
        "env": "CartPole-v1",
        "notes": [],
    }
    assert file.read_bytes() == before
    assert [each.name for each in out.iterdir()] == ["dqn_jax.cleanrl_model"]  # nothing left aside
    unknown = invoke("bundled/CartPole-dqn", "--format", "onnx", "--out", str(out))
    assert unknown.exit_code == 2
    assert "no export format 'onnx'; there are: native, cleanrl, cleanrl-jax" in unknown.stderr
    assert set(EXPORT_FORMATS) == {"native", "cleanrl", "cleanrl-jax"}
