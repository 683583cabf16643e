"""A student from another installed package: built, installed and found as a user would have it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
[metadata]
name = third-party-students
version = 1.0

[options]
py_modules = third_party, broken_party

[options.entry_points]
reincarnate.students =
    doubled-dqn = third_party:DOUBLED
    broken-dqn = broken_party:ANYTHING
"""
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
"""
STUDENT = '''
"""A DQN whose Q-values are reported twice as large; enough to tell it from ours."""

import dataclasses

from reincarnate.students.dqn import QDAGGER, Dqn


class Doubled(Dqn):
    def update(self, batch, teacher_log_policy, coefficient):
        metrics = super().update(batch, teacher_log_policy, coefficient)
        return metrics | {"q_twice": 2 * metrics["q_mean"]}


DOUBLED = dataclasses.replace(
    QDAGGER, name="doubled-dqn", summary="from another package", paper="none", factory=Doubled
)
'''
USER = """
import json
import torch
from reincarnate.config import preset
from reincarnate.errors import UserError
from reincarnate.students.student import get_student, registry
from reincarnate.types import Batch, EnvSpec

entry = get_student("doubled-dqn")
spec, device = EnvSpec("CartPole-v1", "vector", 2, (4,)), torch.device("cpu")
student = entry.factory(preset("quick"), spec, device, "fp32", torch.Generator().manual_seed(0))
obs, zeros = torch.ones(3, 4), torch.zeros(3)
batch = Batch(obs, zeros.long(), zeros, zeros, obs, torch.zeros(3, 2), zeros)
metrics = student.update(batch, torch.log_softmax(batch.teacher_outputs, 1), torch.tensor(1.0))
try:
    get_student("broken-dqn")
except UserError as error:
    broken = str(error)
print(json.dumps({
    "names": list(registry()),
    "summary": entry.summary,
    "offline": entry.method.offline,
    "ratio": (metrics["q_twice"] / metrics["q_mean"]).item(),
    "broken": broken,
}))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder into which pip has installed the package."""
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "setup.cfg").write_text(SETUP)
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "third_party.py").write_text(STUDENT)
    (source / "broken_party.py").write_text("import a_package_that_is_not_there\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, *offline, str(source)], check=True, cwd=tmp_path, capture_output=True, timeout=300)
    return target


def python(site: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=site, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_student_from_another_package_is_found_and_trains(site: Path) -> None:
    found = json.loads(python(site, "-c", USER))
    assert found["names"] == ["doubled-dqn", "dqn", "muesli", "qdagger-dqn", "qdagger-muesli"]
    assert found["summary"] == "from another package"
    assert found["offline"]
    assert found["ratio"] == pytest.approx(2.0)
    assert "student 'broken-dqn' of package 'third-party-students' cannot be used" in found["broken"]
    assert "No module named 'a_package_that_is_not_there'" in found["broken"]

    listed = json.loads(python(site, "-m", "reincarnate", "students", "list", "--json"))
    assert [row["name"] for row in listed] == found["names"]
    assert listed[0] == {"name": "doubled-dqn", "summary": "from another package", "paper": "none"}
