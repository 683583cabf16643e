"""How Muesli's network is built: options, sizes and names."""

import pytest

from reincarnate.errors import UserError
from reincarnate.networks import build_muesli_network, muesli_options

from muesli_networks import IMAGE, VECTOR, A, build


def test_the_papers_size() -> None:
    network = build_muesli_network(
        "impala", (3, 96, 96), 18, device="meta", trunk={"channels": (64, 128, 128, 64), "hidden": 512}
    )
    assert network.trunk.fc.weight.shape == (512, 2304)  # 6 x 6 x 64
    assert len(network.trunk.sections) == 4
    assert network.core.weight_hh.shape == (4 * 512, 512)
    assert network.model.lstm.weight_ih.shape == (4 * 1024, 18)
    assert network.model.initial.weight.shape == (1024, 512 + 512)
    assert network.value.weight.shape == (601, 512 + 512)
    assert network.model.reward.weight.shape == (601, 1024)


def test_names_are_an_interface() -> None:
    assert [name for name, _ in build(core=9).named_parameters()] == [
        "trunk.layers.0.weight", "trunk.layers.0.bias",
        "core.weight_ih", "core.weight_hh", "core.bias",
        "policy.weight", "policy.bias", "value.weight", "value.bias",
        "model.initial.weight", "model.initial.bias",
        "model.lstm.weight_ih", "model.lstm.weight_hh", "model.lstm.bias",
        "model.reward.weight", "model.reward.bias", "model.value.weight", "model.value.bias",
        "model.policy.weight", "model.policy.bias",
    ]  # fmt: skip


def test_options_can_be_saved_and_build_the_same_network() -> None:
    options = muesli_options("mlp", core=None, model=32, trunk={"hidden": (16,)})
    assert options == {
        "core": None,
        "model": 32,
        "bins": 601,
        "feedback": False,
        "trunk": {"hidden": [16], "activation": "relu"},
    }
    network = build_muesli_network("mlp", VECTOR, A, **options)
    assert network.core is None
    assert network.trunk.features == 16
    assert muesli_options("impala")["trunk"]["channels"] == [16, 32, 32]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_muesli_network("mlp", VECTOR, A, core=0), "core must have at least 1 unit, got 0"),
        (lambda: build_muesli_network("mlp", VECTOR, A, model=0), "model must have at least 1 unit"),
        (
            lambda: build_muesli_network("mlp", VECTOR, A, core=None, feedback=True),
            "feedback .* needs an LSTM",
        ),
        (lambda: build_muesli_network("impla", IMAGE, A), "no network 'impla'"),
        (lambda: build_muesli_network("mlp", VECTOR, A, trunk={"hiden": 3}), "no option 'hiden'"),
        (lambda: muesli_options("mlp", cor=3), "no option 'cor'"),
    ],
)
def test_what_does_not_fit_is_refused(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
