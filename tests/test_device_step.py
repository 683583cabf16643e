"""A step: the plain function on the CPU; what CUDA is told to do, in order, by a stand-in and by a device."""

import contextlib
import types

import pytest
import torch

from reincarnate import device as room

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_step_on_the_cpu_is_the_function() -> None:
    calls: list[int] = []
    step = room.Step(lambda: calls.append(1), CPU)
    for _ in range(30):
        step()
    assert len(calls) == 30


def test_beside_no_capture_work_is_done_at_once() -> None:
    done: list[int] = []
    room.beside_capture(lambda: done.append(1))
    step = room.Step(lambda: room.beside_capture(lambda: done.append(2)), CPU, in_pieces=True)
    step()
    assert done == [1, 2]


class FakeCuda:
    """Records what is asked of CUDA; the parts that the CPU build lacks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        log = self.log

        class Stream:
            def __init__(self, name="side") -> None:
                self.name = str(name)

            def wait_stream(self, other) -> None:
                log.append(f"{self.name} waits for {other.name}")

            def synchronize(self) -> None:
                log.append(f"{self.name} drained")

        class Graph:
            def register_generator_state(self, generator) -> None:
                log.append(f"register {generator}")

            def replay(self) -> None:
                log.append("replay")

        @contextlib.contextmanager
        def region(name: str):
            log.append(f"enter {name}")
            yield
            log.append(f"leave {name}")

        main = Stream("main")
        fake = types.SimpleNamespace(
            Stream=lambda device: Stream(),
            current_stream=lambda: main,
            stream=lambda stream: region(stream.name),
            CUDAGraph=Graph,
            graph=lambda graph, stream: region(f"capture on {stream.name}"),
        )
        for name, value in vars(fake).items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_a_step_on_cuda_warms_up_on_the_captured_stream_then_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    log = FakeCuda(monkeypatch).log
    step = room.Step(lambda: log.append("run"), CUDA, ["generator"])
    step()
    assert log == ["side waits for main", "enter side", "run", "leave side", "main waits for side"]
    for _ in range(room.WARM_UP_UPDATES - 2):
        step()
    assert "replay" not in log
    log.clear()
    step()  # the last real one, and the recording, which computes nothing
    assert log == [
        *["side waits for main", "enter side", "run", "leave side", "main waits for side"],
        *["side drained", "register generator", "enter capture on side", "run", "leave capture on side"],
    ]
    log.clear()
    step()
    step()
    assert log == ["replay", "replay"]


def test_what_is_beside_a_capture_is_done_between_two_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    log = FakeCuda(monkeypatch).log
    graphs: list[object] = []

    class Graph:
        def __init__(self) -> None:
            graphs.append(self)
            self.name = f"graph {len(graphs)}"

        def pool(self) -> str:
            return f"pool of {self.name}"

        def register_generator_state(self, generator) -> None:
            log.append(f"register {generator} with {self.name}")

        def replay(self) -> None:
            log.append(f"replay {self.name}")

    @contextlib.contextmanager
    def capture(graph, stream, capture_error_mode, pool=None):
        log.append(f"begin {graph.name} on {stream.name}, {capture_error_mode}, {pool}")
        yield
        log.append(f"end {graph.name}")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)

    def update() -> None:
        log.append("backward")
        room.beside_capture(lambda: log.append("collective"))
        log.append("step")

    step = room.Step(update, CUDA, ["generator"], in_pieces=True)
    for _ in range(room.WARM_UP_UPDATES - 1):
        step()
    assert not graphs
    assert log.count("collective") == room.WARM_UP_UPDATES - 1  # eagerly, in its place
    log.clear()
    step()
    recorded = log[log.index("side drained") + 1 :]
    assert recorded == [
        "register generator with graph 1",
        "begin graph 1 on side, thread_local, None",
        *["backward", "end graph 1", "register generator with graph 2"],
        "begin graph 2 on side, thread_local, pool of graph 1",
        *["step", "end graph 2"],
    ]  # nothing collective is recorded, on no rank
    log.clear()
    step()
    step()
    assert log == ["replay graph 1", "collective", "replay graph 2"] * 2


def test_a_failed_capture_leaves_the_garbage_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    calls = iter(range(100))

    def function() -> None:
        if next(calls) == room.WARM_UP_UPDATES:
            raise RuntimeError("operation not permitted when stream is capturing")

    step = room.Step(function, CUDA)
    for _ in range(room.WARM_UP_UPDATES - 1):
        step()
    with pytest.raises(RuntimeError, match="capturing"):
        step()
    assert room.gc.isenabled()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_step_gives_what_plain_calls_give() -> None:
    def train(captured: bool) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(0)
        weight = torch.zeros(64, 8, device="cuda", requires_grad=True)
        optimizer = room.make_adam([weight], 1e-2, 1e-8, CUDA)

        def update() -> None:
            optimizer.zero_grad(set_to_none=True)
            x = torch.rand(32, 64, device="cuda", generator=generator)
            (x @ weight - 1).square().mean().backward()
            optimizer.step()

        step = room.Step(update, CUDA, [generator]) if captured else update
        for i in range(200):
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + i))
            step()
        room.synchronize(CUDA)
        return weight.detach().cpu()

    assert torch.equal(train(captured=True), train(captured=False))
