"""The installed package: README's install line, the wheel in a fresh environment, and README's example on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest

from tests.documented import ROOT, all_fences, commands, programs

ON_LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
WHERE = "import towpath; print(towpath.__version__, towpath.__file__)"


def _version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parity
def test_a_wheel_without_a_compiler_runs_the_readme_example(tmp_path: Path) -> None:
    """Build without the C++ extension, and borrow the dependencies of this environment: torch alone takes minutes."""
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "-Cwheel.cmake=false")
    _run(*build, "--outdir", str(tmp_path / "dist"), str(ROOT))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    python = _environment(tmp_path / "fresh", wheel)
    version, file = _run(python, "-c", WHERE).split()
    assert version == _version() and Path(file).is_relative_to(tmp_path)
    _check_that_the_example_learns(python, tmp_path)


@pytest.mark.parity
@pytest.mark.compiles
def test_sdist_builds_a_wheel_with_extension_and_commands(tmp_path: Path) -> None:
    """Compile without optimization. Dependencies are those of this environment."""
    quickly = ("-Ccmake.build-type=Debug", "-Ccmake.define.TOWPATH_OPTIMIZE=-O0")
    _run(sys.executable, "-m", "build", "--no-isolation", *quickly, "--outdir", str(tmp_path / "dist"), str(ROOT))
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "src/towpath/py.typed", "examples/gpt.toml"} <= names
    assert not {name for name in names if name.startswith("benchmarks/results")}
    python = _environment(tmp_path / "fresh", wheel)
    native = "from towpath.codecs.kernels import cpp_codecs as cpp; print(cpp.LEVELS)"
    assert "baseline" in _run(python, "-c", native)
    planned = _run(
        python, "-m", "towpath", "plan", "llama-7b", "--cluster", "ethernet-10g", "--batch", "64", "--length", "2048"
    )
    assert "6.74 billion parameters" in planned


@pytest.mark.parity
@pytest.mark.compiles
def test_readme_install_line_in_an_empty_environment(tmp_path: Path) -> None:
    """Run the line as written, in a clone, with every dependency from the package index."""
    lines = [line for fence in all_fences() if fence.page == "README.md" for line in commands(fence)]
    (install,) = [line for line in lines if line.startswith("pip install")]
    _run("git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone"))
    venv.create(tmp_path / "empty", with_pip=True)
    python = str(tmp_path / "empty" / "bin" / "python")
    constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}  # else torch may bring its libraries for GPUs
    _run(python, "-m", *install.split(), cwd=tmp_path / "clone", **constraints)
    brought = "import importlib.metadata as m; print(*sorted(d.name.lower() for d in m.distributions()))"
    unwanted = {"matplotlib", "datasets", "transformers", "pillow", "pandas", "pyarrow"}
    assert not unwanted & set(_run(python, "-c", brought).split())
    _check_that_the_example_learns(python, tmp_path)


def _check_that_the_example_learns(python: str, folder: Path) -> None:
    """Run README's example as written, on two ranks of CPUs."""
    (folder / "train.py").write_text(programs("README.md")[""])
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = _run(*torchrun, str(folder / "train.py"), **ON_LOOPBACK)
    losses = [float(loss) for loss in re.findall(r"loss after 50 steps: ([\d.]+)", said)]
    assert len(losses) == 2 and max(losses) < 0.9, said  # about 1 before the first step


def _environment(folder: Path, wheel: Path) -> str:
    """Its interpreter. Of the environment that runs the tests it sees all but the package itself."""
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    here = _run(sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    there = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", there, str(wheel))
    Path(there, "dependencies.pth").write_text(here + "\n")
    return python


def _run(*command: str, cwd: Path = Path("/"), **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
