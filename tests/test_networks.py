"""Networks against plain numpy, against flax, and in every way that they are used."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn

from reincarnate.device import autocast
from reincarnate.errors import UserError
from reincarnate.networks import NETWORKS, build_network, default_network, default_options, nature
from reincarnate.networks.impala import pool

from random_tensors import generator

CPU = torch.device("cpu")
SHAPES = {"nature": (4, 84, 84), "impala": (4, 84, 84), "mlp": (4,), "iqn": (4, 84, 84)}


def pixels(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(7))


def arrays(network: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.double().numpy() for name, value in network.state_dict().items()}


# ------------------------------------------------------------ the numpy oracle


def np_conv(x: np.ndarray, weights: dict[str, np.ndarray], name: str, stride: int = 1, pad: int = 0):
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    windows = sliding_window_view(x, weight.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    return np.einsum("bchwij,ocij->bohw", windows, weight) + bias[:, None, None]


def np_pool(x: np.ndarray, pads: Sequence[tuple[int, int]]) -> np.ndarray:
    x = np.pad(x, ((0, 0), (0, 0), *pads), constant_values=-np.inf)
    return sliding_window_view(x, (3, 3), axis=(2, 3))[:, :, ::2, ::2].max(axis=(4, 5))


def np_linear(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def np_nature(obs: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    x = obs / 255
    for name, stride in (("conv1", 4), ("conv2", 2), ("conv3", 1)):
        x = relu(np_conv(x, w, f"trunk.{name}", stride))
    return np_linear(relu(np_linear(x.reshape(len(x), -1), w, "trunk.fc")), w, "head")


def np_impala(obs: np.ndarray, w: dict[str, np.ndarray], padding: str) -> np.ndarray:
    x = obs / 255
    for i in range(3):
        x = np_conv(x, w, f"trunk.sections.{i}.conv", pad=1)
        even = [(0, 1) if size % 2 == 0 else (1, 1) for size in x.shape[2:]]  # what SAME means
        x = np_pool(x, even if padding == "same" else [(1, 1), (1, 1)])
        for j in range(2):
            block = f"trunk.sections.{i}.blocks.{j}"
            inner = np_conv(relu(x), w, f"{block}.conv1", pad=1)
            x = x + np_conv(relu(inner), w, f"{block}.conv2", pad=1)
    return np_linear(relu(np_linear(relu(x).reshape(len(x), -1), w, "trunk.fc")), w, "head")


def check(network: nn.Module, obs: torch.Tensor, expected: np.ndarray) -> None:
    """With and without a gradient: the two take different paths."""
    found = network(obs)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-5)
    with torch.inference_mode():
        np.testing.assert_allclose(network(obs).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(36, 36), (44, 37), (84, 84)])
def test_nature_is_what_numpy_computes(height: int, width: int) -> None:
    network = build_network("nature", (3, height, width), 5, generator=generator(), hidden=20)
    obs = pixels(2, 3, height, width)
    check(network, obs, np_nature(obs.numpy(), arrays(network)))


@pytest.mark.parametrize("padding", ["torch", "same"])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (21, 42), (19, 13), (5, 8)])
def test_impala_is_what_numpy_computes(height: int, width: int, padding: str) -> None:
    network = build_network(
        "impala", (2, height, width), 3, generator=generator(), channels=(3, 4, 5), hidden=6,
        pool_padding=padding,
    )  # fmt: skip
    obs = pixels(2, 2, height, width)
    check(network, obs, np_impala(obs.numpy(), arrays(network), padding))


@pytest.mark.parametrize(("activation", "function"), [("relu", relu), ("tanh", np.tanh)])
def test_mlp_is_what_numpy_computes(activation: str, function) -> None:
    network = build_network("mlp", (6,), 3, generator=generator(), hidden=(7, 5), activation=activation)
    obs, w = torch.randn(4, 6, generator=generator(1)), arrays(network)
    x = obs.double().numpy()
    for name in ("trunk.layers.0", "trunk.layers.1"):
        x = function(np_linear(x, w, name))
    check(network, obs, np_linear(x, w, "head"))


# ------------------------------------------------------------ the flax oracle


def flax_modules():
    """The same architectures in flax, layers named as ours; where flax needs a dot it has ``--``."""
    flax = pytest.importorskip("flax.linen")
    jax = pytest.importorskip("jax")

    class Nature(flax.Module):
        @flax.compact
        def __call__(self, x):
            x = x / 255.0
            for i, (features, size, stride) in enumerate(((32, 8, 4), (64, 4, 2), (64, 3, 1)), start=1):
                conv = flax.Conv(features, (size, size), (stride, stride), "VALID", name=f"trunk--conv{i}")
                x = flax.relu(conv(x))
            x = flax.relu(flax.Dense(512, name="trunk--fc")(x.reshape((x.shape[0], -1))))
            return flax.Dense(5, name="head")(x)

    class Impala(flax.Module):
        @flax.compact
        def __call__(self, x):
            x = x / 255.0
            for i, channels in enumerate((16, 32, 32)):
                section = f"trunk--sections--{i}"
                x = flax.Conv(channels, (3, 3), name=f"{section}--conv")(x)
                x = flax.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
                for j in range(2):
                    block = f"{section}--blocks--{j}"
                    inner = flax.Conv(channels, (3, 3), name=f"{block}--conv1")(flax.relu(x))
                    x = x + flax.Conv(channels, (3, 3), name=f"{block}--conv2")(flax.relu(inner))
            x = flax.relu(x).reshape((x.shape[0], -1))
            x = flax.relu(flax.Dense(256, name="trunk--fc")(x))
            return flax.Dense(5, name="head")(x)

    return jax, {"nature": Nature(), "impala": Impala()}


def from_flax(network: nn.Module, params: dict, channels: int, height: int, width: int) -> None:
    """Copy flax parameters; [channels, height, width] is what ``trunk.fc`` reads."""
    state = {}
    for name, layer in params.items():
        kernel = layer["kernel"]
        if kernel.ndim == 4:
            kernel = kernel.transpose(3, 2, 0, 1)
        elif name == "trunk--fc":  # flax flattens H, W, C
            by_place = kernel.reshape(height, width, channels, -1)
            kernel = by_place.transpose(3, 2, 0, 1).reshape(-1, len(kernel))
        else:
            kernel = kernel.T
        state[f"{name.replace('--', '.')}.weight"] = torch.tensor(kernel.copy())
        state[f"{name.replace('--', '.')}.bias"] = torch.tensor(layer["bias"])
    network.load_state_dict(state)


@pytest.mark.parametrize("size", [84, 63])
@pytest.mark.parametrize("name", ["nature", "impala"])
def test_weights_moved_from_flax_give_the_same_outputs(name: str, size: int) -> None:
    jax, modules = flax_modules()
    obs = pixels(3, 4, size, size)
    nhwc = obs.permute(0, 2, 3, 1).numpy().astype(np.float32)
    shapes = jax.eval_shape(modules[name].init, jax.random.PRNGKey(0), nhwc)["params"]
    rng = np.random.default_rng(size)

    def draw(shape):
        fan_in = np.prod(shape.shape[:-1]) if len(shape.shape) > 1 else 100
        return (rng.standard_normal(shape.shape) / np.sqrt(fan_in)).astype(np.float32)

    params = jax.tree.map(draw, shapes)
    expected = np.asarray(jax.jit(modules[name].apply)({"params": params}, nhwc))
    network = build_network(
        name, (4, size, size), 5, **({"pool_padding": "same"} if name == "impala" else {})
    )
    side = -(-size // 8) if name == "impala" else ((size - 8) // 4 + 1 - 4) // 2 - 1
    from_flax(network, params, 32 if name == "impala" else 64, side, side)
    with torch.inference_mode():
        found = network(obs).numpy()
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(expected).max() > 0.1


# ------------------------------------------------------------ pooling


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from(["torch", "same"]), st.integers(0, 99))
def test_pooling_without_a_gradient_gives_the_same_values(h: int, w: int, padding, seed: int) -> None:
    x = torch.randn(2, 3, h, w, generator=generator(seed)).to(torch.bfloat16)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    with torch.no_grad():
        found = pool(x, padding)
    assert torch.equal(found, pool(x, padding))
    assert found.shape == (2, 3, (h + 1) // 2, (w + 1) // 2)


def test_the_two_paddings_differ_on_even_sizes_and_agree_on_odd_ones() -> None:
    ramp = torch.arange(36.0).reshape(1, 1, 6, 6)
    assert pool(ramp, "torch")[0, 0].tolist() == [[7, 9, 11], [19, 21, 23], [31, 33, 35]]
    assert pool(ramp, "same")[0, 0].tolist() == [[14, 16, 17], [26, 28, 29], [32, 34, 35]]
    odd = torch.arange(25.0).reshape(1, 1, 5, 5)
    assert torch.equal(pool(odd, "torch"), pool(odd, "same"))


# ------------------------------------------------------------ names, weights, use


def test_names_are_an_interface() -> None:
    def names(name: str, **options) -> list[str]:
        keys = build_network(name, SHAPES[name], 2, **options).state_dict()
        assert all(key.endswith((".weight", ".bias")) for key in keys)
        return [key.removesuffix(".weight") for key in keys if key.endswith(".weight")]

    assert names("nature") == ["trunk.conv1", "trunk.conv2", "trunk.conv3", "trunk.fc", "head"]
    assert names("mlp", hidden=(8,)) == ["trunk.layers.0", "head"]
    section = ["conv", "blocks.0.conv1", "blocks.0.conv2", "blocks.1.conv1", "blocks.1.conv2"]
    assert names("impala") == [
        *(f"trunk.sections.{i}.{layer}" for i in range(3) for layer in section), "trunk.fc", "head",
    ]  # fmt: skip


def test_sizes_are_those_of_the_papers() -> None:
    def parameters(name: str) -> int:
        return sum(value.numel() for value in build_network(name, SHAPES[name], 18).parameters())

    assert parameters("nature") == 8224 + 32832 + 36928 + (3136 * 512 + 512) + (512 * 18 + 18)
    convolutions = (592 + 4 * 2320) + (4640 + 4 * 9248) + (9248 + 4 * 9248)
    assert parameters("impala") == convolutions + (3872 * 256 + 256) + (256 * 18 + 18)
    assert parameters("mlp") == (4 * 256 + 256) + (256 * 256 + 256) + (256 * 18 + 18)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_pytorchs_default_drawn_by_the_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, same, other = (build_network(name, SHAPES[name], 6, generator=generator(s)) for s in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    for key, value in first.state_dict().items():
        assert torch.equal(value, same.state_dict()[key])
        assert not torch.equal(value, other.state_dict()[key])
    for layer in first.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            bound = layer.weight[0].numel() ** -0.5
            assert layer.weight.abs().max() <= bound
            assert layer.bias.abs().max() <= bound
            if layer.weight.numel() > 1000:
                assert layer.weight.abs().max() > 0.99 * bound
                assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_pixels_are_divided_by_255_and_floats_are_not(name: str) -> None:
    network, obs = build_network(name, SHAPES[name], 6, generator=generator()), pixels(2, 4, 84, 84)
    np.testing.assert_allclose(
        network(obs).detach().numpy(), network(obs.float() / 255).detach().numpy(), atol=1e-6
    )


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_memory_layout_changes_nothing(name: str) -> None:
    network, obs = build_network(name, (4, 44, 51), 6, generator=generator()), pixels(2, 4, 44, 51)
    plain = network(obs).detach()
    strided = pixels(2, 44, 51, 4)
    strided.copy_(obs.permute(0, 2, 3, 1))
    network.to(memory_format=torch.channels_last)
    for layout in (obs, obs.contiguous(memory_format=torch.channels_last), strided.permute(0, 3, 1, 2)):
        np.testing.assert_allclose(network(layout).detach().numpy(), plain.numpy(), atol=1e-6)
    single = network(obs[:1]).detach()
    np.testing.assert_allclose(single.numpy(), plain[:1].numpy(), atol=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_autocast_computes_the_trunk_in_bfloat16_and_the_head_in_float32(name: str) -> None:
    network = build_network(name, SHAPES[name], 6, generator=generator())
    obs = pixels(4, *SHAPES[name]) if name != "mlp" else torch.randn(4, 4, generator=generator())
    seen: dict[str, torch.Tensor] = {}
    network.trunk.register_forward_hook(lambda module, inputs, output: seen.update(features=output))
    with torch.no_grad(), autocast(CPU, "bf16"):
        outputs = network(obs)
    # IQN's features are a sum over quantiles, which is added up in float32.
    assert seen["features"].dtype == (torch.float32 if name == "iqn" else torch.bfloat16)
    assert outputs.dtype == torch.float32
    weight, bias = network.head.weight, network.head.bias
    exact = seen["features"].double() @ weight.double().T + bias.double()
    np.testing.assert_allclose(outputs.numpy(), exact.detach().numpy(), atol=1e-6)
    with torch.no_grad():
        np.testing.assert_allclose(outputs.numpy(), network(obs).numpy(), atol=0.02)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    network = build_network(name, SHAPES[name], 6, generator=generator())
    obs = pixels(4, *SHAPES[name]) if name != "mlp" else torch.randn(4, 4, generator=generator())
    for precision in ("fp32", "bf16"):
        network.zero_grad()
        with autocast(CPU, precision):
            outputs = network(obs)
        outputs.square().sum().backward()
        assert all(value.grad.abs().sum() > 0 for value in network.parameters())


def test_defaults_follow_the_kind_of_environment_and_can_be_saved() -> None:
    assert default_network("atari") == "impala"
    assert default_network("atari", light=True) == "nature"
    assert default_network("vector") == default_network("vector", light=True) == "mlp"
    assert default_options("impala") == {
        "hidden": 256,
        "channels": [16, 32, 32],
        "pool_padding": "torch",
        "neck": [],
    }
    assert default_options("mlp") == {"hidden": [256, 256], "activation": "relu"}
    assert default_options("nature") == {
        "hidden": 512,
        "padding": "valid",
        "neck": [],
        "neck_activation": "relu",
    }
    for name in NETWORKS:
        explicit = build_network(name, SHAPES[name], 2, generator=generator(), **default_options(name))
        implied = build_network(name, SHAPES[name], 2, generator=generator())
        assert {key: value.shape for key, value in explicit.state_dict().items()} == {
            key: value.shape for key, value in implied.state_dict().items()
        }


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("natur", (4, 84, 84), 2), {}, "no network 'natur'; known: nature, impala, mlp"),
        (("nature", (4, 84, 35), 2), {}, "at least 36x36 pixels, got a side of 35"),
        (("nature", (4,), 2), {}, r"nature network takes observations \[frames, height, width\], got \[4\]"),
        (("impala", (8,), 2), {}, r"impala network takes observations \[frames, height, width\]"),
        (("mlp", (4, 84, 84), 2), {}, r"mlp network takes observations \[features\], got \[4, 84, 84\]"),
        (("mlp", (4,), 0), {}, "at least one output"),
        (("mlp", (4,), 2), {"hiden": 3}, "mlp network has no option 'hiden'; known: hidden, activation"),
        (("mlp", (4,), 2), {"activation": "selu"}, "activation must be one of relu, tanh"),
        (("impala", (4, 84, 84), 2), {"pool_padding": "valid"}, "pool_padding must be torch or same"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, options, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_network(*arguments, **options)


def test_a_categorical_head_reads_out_the_mean_of_its_distribution() -> None:
    network = build_network("mlp", (3,), 2, hidden=[4], head={"atoms": 5, "v_min": -1.0, "v_max": 3.0})
    obs = torch.randn(7, 3)
    logits = torch.nn.functional.linear(network.trunk(obs), network.head.weight, network.head.bias)
    probabilities = torch.softmax(logits.reshape(7, 2, 5), dim=2)
    torch.testing.assert_close(network(obs), probabilities @ torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0]))


def test_normalised_observations_are_clipped() -> None:
    network = build_network("mlp", (2,), 2, normalise={"epsilon": 0.5, "clip": 2.0})
    plain = build_network("mlp", (2,), 2)
    plain.load_state_dict({n: v for n, v in network.state_dict().items() if "normaliser" not in n})
    network.normaliser.mean.copy_(torch.tensor([1.0, -1.0]))
    network.normaliser.variance.copy_(torch.tensor([3.5, 0.5]))
    torch.testing.assert_close(
        network(torch.tensor([[3.0, 0.5], [-99.0, -1.0]])), plain(torch.tensor([[1.0, 1.5], [-2.0, 0.0]]))
    )


@pytest.mark.parametrize(("kernel", "stride"), [(8, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("side", [84, 21, 11, 96])
def test_same_padding_keeps_the_size_over_the_stride(kernel: int, stride: int, side: int) -> None:
    padded = nature.pad_same(torch.ones(1, 1, side, side), kernel, stride)
    out = torch.nn.functional.conv2d(padded, torch.ones(1, 1, kernel, kernel), stride=stride)
    assert out.shape[-1] == -(-side // stride)
    near, far = (kernel**2 - out[0, 0, 0, 0], kernel**2 - out[0, 0, -1, -1])
    assert near <= far  # flax and TensorFlow put the odd zero at the far side
