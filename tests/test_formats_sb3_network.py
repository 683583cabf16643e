"""The network that a Stable-Baselines3 archive tells of, and policies that do not fit or are not played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reincarnate.teachers.formats import detect_and_read

import sb3_writers as writers
from hostile_files import CARTPOLE, refused


@pytest.fixture(scope="module", autouse=True)
def _everything_is_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """So that the limits of memory count reading alone."""
    detect_and_read(writers.forge(tmp_path_factory.mktemp("first") / "m.zip"), CARTPOLE)


@pytest.mark.parametrize(
    ("tensors", "data", "message"),
    [
        (None, {"actions": 3}, r"2 outputs in policy\.pth, 3 actions in data"),
        (None, {"shape": (6,)}, r"takes observations of shape \[4\], data says \[6\]"),
        (None, {"shape": (2, 2, 1)}, r"flattens images of shape \[2, 2, 1\]"),
        (
            {**writers.dqn_tensors(), "q_net.norm.weight": torch.zeros(1)},
            {},
            r"not the keys of Stable-Baselines3's dqn: .*unknown 'q_net\.norm\.weight'|missing",
        ),
        (
            {key: value for key, value in writers.dqn_tensors().items() if key != "q_net.q_net.2.bias"},
            {},
            r"not the keys of Stable-Baselines3's dqn: .*missing 'q_net\.q_net\.2\.bias'",
        ),
        (
            {**writers.dqn_tensors(), "q_net.q_net.2.weight": torch.zeros(2, 9)},
            {},
            r"q_net\.q_net\.2\.weight: expected \[2, 8\], found \[2, 9\]",
        ),
        (
            {**writers.ppo_tensors(), "value_net.weight": torch.zeros(3, 8)},
            {},
            r"value_net\.weight: expected \[1, any\], found \[3, 8\]",
        ),
        ({"weight": torch.zeros(2)}, {}, r"the keys of no Stable-Baselines3 policy .*found weight"),
        ({**writers.ppo_tensors(), "log_std": torch.zeros(2)}, {}, r"a policy of continuous actions"),
        ({**writers.ppo_tensors(), "lstm_actor.weight_ih_l0": torch.zeros(2)}, {}, r"a recurrent policy"),
        (
            None,
            {"policy_kwargs": {"activation_fn": "<class 'torch.nn.modules.activation.Mish'>"}},
            r"activation Mish",
        ),
        (
            None,
            {"policy_kwargs": {"features_extractor_class": "<class '__main__.MyCnn'>"}},
            r"a features extractor of another kind \(__main__\.MyCnn\)",
        ),
        (
            None,
            {"policy_class": {"__module__": "__main__"}},
            r"a policy of somebody's own class \(__main__\)",
        ),
        (
            writers.ppo_tensors(),
            {"policy_class": {"__module__": "sb3_contrib.common.maskable.policies"}},
            r"MaskablePPO, which chooses among",
        ),
        (
            None,
            {"action_space": {":type:": "<class 'gym.spaces.multi_discrete.MultiDiscrete'>"}},
            r"\(MultiDiscrete\)",
        ),
        (
            None,
            {"action_space": {":type:": "<class 'gym.spaces.multi_binary.MultiBinary'>"}},
            r"\(MultiBinary\)",
        ),
        (None, {"action_space": writers.ACTIONS | {"n": "2", "start": "1"}}, r"actions that count from 1"),
        (None, {"observation_space": {":type:": "<class 'gym.spaces.dict.Dict'>"}}, r"MultiInputPolicy"),
    ],
)
def test_what_does_not_fit_names_what_was_expected(
    tmp_path: Path, tensors: Any, data: dict[str, Any], message: str
) -> None:
    refused(writers.forge(tmp_path / "m.zip", tensors, writers.data_of(**data)), message)


@pytest.mark.parametrize(("quantiles", "actions"), [(3, 4), (None, 5)])
def test_quantiles_that_do_not_divide_the_outputs_are_told(
    tmp_path: Path, quantiles: int | None, actions: int
) -> None:
    own = writers.linear("quantile_net.quantile_net.0", 4, 8) | writers.linear(
        "quantile_net.quantile_net.2", 8, 14
    )
    tensors = own | {
        key.replace("quantile_net.", "quantile_net_target.", 1): value for key, value in own.items()
    }
    data = writers.data_of(actions=actions, policy_kwargs={"n_quantiles": quantiles} if quantiles else {})
    refused(writers.forge(tmp_path / "m.zip", tensors, data), r"14 outputs, .* do not belong together")


def test_shared_layers_of_old_versions_come_first(tmp_path: Path) -> None:
    """Before 1.8, ``net_arch=[8, dict(pi=[6], vf=[5])]`` made layers that actor and critic share."""
    tensors = (
        writers.linear("mlp_extractor.shared_net.0", 4, 8)
        | writers.linear("mlp_extractor.policy_net.0", 8, 6)
        | writers.linear("mlp_extractor.value_net.0", 8, 5)
        | writers.linear("action_net", 6, 2)
        | writers.linear("value_net", 5, 1)
    )
    read = detect_and_read(writers.forge(tmp_path / "m.zip", tensors), CARTPOLE)
    assert read.spec.network_options == {"hidden": [8, 6], "activation": "tanh"}
    network, obs = read.spec.build(), torch.randn(5, 4)
    network.load_state_dict(read.state_dict)
    features = obs
    for layer in ("mlp_extractor.shared_net.0", "mlp_extractor.policy_net.0"):
        features = torch.tanh(features @ tensors[f"{layer}.weight"].T + tensors[f"{layer}.bias"])
    expected = features @ tensors["action_net.weight"].T + tensors["action_net.bias"]
    torch.testing.assert_close(network(obs), expected)


@pytest.mark.parametrize(
    ("text", "activation"),
    [
        ("<class 'torch.nn.modules.activation.LeakyReLU'>", "leaky_relu"),
        ("<class 'torch.nn.modules.activation.GELU'>", "gelu"),
        ("<class 'torch.nn.modules.activation.Sigmoid'>", "sigmoid"),
    ],
)
def test_activations_are_read_from_the_text(tmp_path: Path, text: str, activation: str) -> None:
    data = writers.data_of(policy_kwargs={"activation_fn": text})
    read = detect_and_read(writers.forge(tmp_path / "m.zip", data=data), CARTPOLE)
    assert read.spec.network_options["activation"] == activation
    assert "activation" not in read.assumed


def test_the_configuration_tells_where_data_does_not(tmp_path: Path) -> None:
    data = writers.data_of(policy_kwargs=None)
    path = writers.forge(tmp_path / "m.zip", data=data)
    assert detect_and_read(path, CARTPOLE).assumed["activation"].endswith("nothing states it")
    (tmp_path / "config.yml").write_text("policy_kwargs: dict(net_arch=[8], activation_fn=nn.Tanh)\n")
    assert detect_and_read(path, CARTPOLE).spec.network_options["activation"] == "tanh"
