"""Students, batches and comparisons that the tests of students share."""

import pytest
import torch

from reincarnate.config import RunConfig, override, preset
from reincarnate.losses import log_policy
from reincarnate.students.student import get_student, registry
from reincarnate.types import Batch, EnvSpec

from random_tensors import generator

CPU, META = torch.device("cpu"), torch.device("meta")
VECTOR = EnvSpec("Chain-v0", "vector", 3, (5,))
ATARI = EnvSpec("Small-v0", "atari", 4, (2, 36, 37))
SPECS = {"vector": VECTOR, "atari": ATARI}
#: Students of transitions; those of sequences have test_muesli_student.py.
STUDENTS = sorted(name for name in registry() if not name.endswith("muesli"))
cases = pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in STUDENTS for kind in SPECS])


def config(**settings) -> RunConfig:
    values = {key.replace("__", "."): value for key, value in settings.items()}
    return override(preset("quick"), {"optimizer.batch_size": 6, "optimizer.learning_rate": 1e-3} | values)


def build(name: str = "qdagger-dqn", kind: str = "vector", seed: int = 0, precision="fp32", **settings):
    factory = get_student(name).factory
    return factory(config(**settings), SPECS[kind], CPU, precision, generator(seed))


def batch_of(spec: EnvSpec, size: int = 6, seed: int = 0) -> Batch:
    g = generator(seed)

    def observations() -> torch.Tensor:
        if spec.kind == "atari":
            return torch.randint(0, 256, (size, *spec.obs_shape), dtype=torch.uint8, generator=g)
        return torch.randn(size, *spec.obs_shape, generator=g)

    return Batch(
        obs=observations(),
        action=torch.randint(0, spec.num_actions, (size,), generator=g),
        reward=torch.randn(size, generator=g),
        discount=torch.rand(size, generator=g).round() * 0.97,
        next_obs=observations(),
        teacher_outputs=torch.randn(size, spec.num_actions, generator=g),
        behaviour_log_prob=torch.zeros(size),
    )


def advice(batch: Batch, name: str = "qdagger-dqn") -> torch.Tensor | None:
    return log_policy(batch.teacher_outputs, 0.5) if get_student(name).method.distill else None


def train(learner, spec: EnvSpec, updates: int, name: str = "qdagger-dqn", first: int = 0, m: float = 1.0):
    metrics = {}
    for i in range(first, first + updates):
        batch = batch_of(spec, seed=i)
        metrics = learner.update(batch, advice(batch, name), torch.tensor(m))
    return metrics


def weights(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in network.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[bool]:
    assert first.keys() == second.keys()
    return [torch.equal(first[key], second[key]) for key in first]
