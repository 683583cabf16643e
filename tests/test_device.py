"""The device room on the CPU: who may name what, choosing, precision, the optimiser and the process."""

import platform
import re
import resource
import types
from pathlib import Path

import pytest
import torch

from reincarnate import device as room
from reincarnate.errors import UserError

from paths import REPOSITORY

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


# ------------------------------------------------------------ who may name what


def sources() -> dict[str, str]:
    files = [
        path for part in ("reincarnate", "teachers", "students") for path in (REPOSITORY / part).rglob("*.py")
    ]
    assert len(files) > 20
    return {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in files}


def naming(pattern: str) -> set[str]:
    return {name for name, text in sources().items() if re.search(pattern, text)}


def test_only_device_names_cuda_modules() -> None:
    assert naming(r"torch\.cuda|from torch import cuda|\.cuda\(|torch\.backends\.cud") == {
        "reincarnate/device.py"
    }


def test_only_envs_imports_envpool() -> None:
    found = {Path(name).parts[1] for name in naming(r"import envpool|from envpool")}
    assert found <= {"envs", "envs.py"}


# ------------------------------------------------------------ choosing a device


def test_auto_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert room.pick_device("auto") == room.pick_device("cpu") == CPU
    with pytest.raises(UserError, match="no CUDA device is available"):
        room.pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert room.pick_device("auto") == room.pick_device("cuda") == CUDA
    assert room.pick_device("cpu") == CPU
    with pytest.raises(UserError, match="no device 'gpu'; use auto, cpu or cuda"):
        room.pick_device("gpu")


def test_a_rank_has_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert room.pick_device("auto", 1) == torch.device("cuda", 1)
    assert room.pick_device("cpu", 1) == torch.device("cpu")
    assert chosen == [1]
    with pytest.raises(UserError, match="needs CUDA device 2, and there are 2; start one process per device"):
        room.pick_device("cuda", 2)


# ------------------------------------------------------------ precision


def test_autocast_switches_linear_layers_and_back() -> None:
    layer, x = torch.nn.Linear(3, 2), torch.ones(1, 3)
    with room.autocast(CPU, "bf16"):
        assert layer(x).dtype == torch.bfloat16
        assert room.compute_dtype(CPU) == torch.bfloat16
        with room.autocast(CPU, "fp32"):
            assert layer(x).dtype == torch.float32
            assert room.compute_dtype(CPU) == torch.float32
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == room.compute_dtype(CPU) == torch.float32


def test_autocast_lets_meta_tensors_pass() -> None:
    with room.autocast(META, "bf16"):
        assert room.compute_dtype(META) == torch.float32
        assert torch.nn.Linear(3, 2, device=META)(torch.ones(1, 3, device=META)).dtype == torch.float32


class Clock:
    """Stands still but for the work that says how long it takes."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, durations: dict[str, list[float]]):
        calls = {name: iter(values) for name, values in durations.items()}
        log: list[str] = []

        def make(precision: str):
            def update() -> None:
                log.append(precision)
                self.now += next(calls[precision])

            return update

        return make, log


@pytest.mark.parametrize(("fp32", "expected"), [(2.0, "bf16"), (1.16, "bf16"), (1.14, "fp32"), (0.5, "fp32")])
def test_bfloat16_must_be_clearly_faster(monkeypatch: pytest.MonkeyPatch, fp32: float, expected: str) -> None:
    clock = Clock()
    monkeypatch.setattr(room, "time", clock)
    make, _ = clock.work({"fp32": [0.9] + [fp32 / 10] * 6, "bf16": [0.9] + [0.1] * 6})
    assert room.choose_precision(CPU, make) == expected


def test_timing_takes_turns_and_is_not_fooled_by_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(room, "time", clock)
    # bf16 is twice as fast, but the machine was busy during all of its calls but one
    busy = [0.01, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9]
    make, log = clock.work({"fp32": [0.01] + [0.2] * 6, "bf16": busy})
    monkeypatch.setattr(room, "TIMING_SECONDS", 60.0)
    assert room.choose_precision(CPU, make) == "bf16"
    assert log[2:] == ["fp32", "bf16"] * room.TIMED_ROUNDS


def test_timing_is_short_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(room, "time", clock)
    make, log = clock.work({"fp32": [2.0] * 20, "bf16": [1.0] * 20})
    assert room.choose_precision(CPU, make) == "bf16"
    assert log == ["fp32", "bf16"] * 2  # once to warm up, once timed: 3 seconds have passed


def test_where_two_learners_do_not_fit_the_smaller_precision_is_taken() -> None:
    def make(precision: str):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    assert room.choose_precision(CPU, make) == "bf16"


# ------------------------------------------------------------ optimiser


def losses_of(optimizer_of, steps: int = 50):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, generator=generator).requires_grad_()
    optimizer = optimizer_of([weight])
    for _ in range(steps):
        x = torch.randn(8, 5, generator=generator)
        optimizer.zero_grad()
        (x @ weight - 1).square().mean().backward()
        optimizer.step()
    return weight.detach(), optimizer


def test_adam_is_plain_adam() -> None:
    found, _ = losses_of(lambda params: room.make_adam(params, 1e-2, 1.5e-4, CPU))
    expected, _ = losses_of(
        lambda params: torch.optim.Adam(params, lr=1e-2, eps=1.5e-4, foreach=False, fused=False)
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_adam_follows_its_learning_rate_in_place() -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = room.make_adam([weight], 1.0, 1e-8, CPU)
    rate = optimizer.param_groups[0]["lr"]
    for expected in (1.0, 0.25):
        rate.fill_(expected)
        before = weight.detach().clone()
        weight.grad = torch.ones(3)
        optimizer.step()
        torch.testing.assert_close(before - weight.detach(), torch.full((3,), expected))
    assert optimizer.param_groups[0]["lr"] is rate


# ------------------------------------------------------------ the process


def page_faults(work) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_tuned_for_the_cpu_freed_memory_is_used_again() -> None:
    def work() -> None:
        for _ in range(50):
            blocks = [torch.ones(1 << 20) for _ in range(4)]  # 4 MiB each
            del blocks

    room.tune(CPU)
    work()
    assert page_faults(work) < 50 * 4  # without: 50 * 4 * 1024


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.ctypes, "CDLL", lambda name: types.SimpleNamespace())
    room.tune(CPU)


def test_tuned_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    try:
        room.tune(CUDA)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.benchmark
    finally:
        torch.set_float32_matmul_precision(before)


def test_acting_beside_environments_leaves_them_half_of_the_threads():
    before = torch.get_num_threads()

    def stopped() -> None:
        with room.beside_environments(torch.device("cpu")):
            assert torch.get_num_threads() == 2
            raise KeyboardInterrupt

    try:
        torch.set_num_threads(4)
        with pytest.raises(KeyboardInterrupt):
            stopped()
        assert torch.get_num_threads() == 4
        torch.set_num_threads(1)
        with room.beside_environments(torch.device("cpu")):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
