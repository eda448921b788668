"""The files for schedulers, examples/clusters/: each can be read, and starts a training with the command that is in it.

What a scheduler would do, start the command on each node and say which node it is, is done here by stand-ins. With one
for torchrun, `make test` sees how that is called; with the real one, `make parity` trains on two nodes of the lab.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from lab import Lab
from tests.documented import ROOT

Labs = Callable[..., Lab]
CLUSTERS = ROOT / "examples" / "clusters"
NODES = 2

# Of a node: what the scheduler sets there. $RANK and $MASTER_ADDR are the lab's.
SETS = {
    "slurm.sbatch": "SLURM_NNODES=2 SLURM_NODEID=$RANK SLURM_GPUS_ON_NODE=1 SLURM_JOB_ID=7 "
    "SLURM_JOB_NODELIST=$MASTER_ADDR",
    "kubernetes.yaml": "NODES=2 RANKS_PER_NODE=1 JOB_COMPLETION_INDEX=$RANK MASTER_PORT=29500",
    "skypilot.yaml": "SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=1 SKYPILOT_NODE_RANK=$RANK "
    "SKYPILOT_NODE_IPS=\"$MASTER_ADDR\"$'\\n'other",
    "two_desktops.sh": "LINK=$GLOO_SOCKET_IFNAME NUMBER=$RANK FIRST=$MASTER_ADDR",
}
STAND_INS = {
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": '#!/bin/bash\necho "${@: -1}"\n',
}
SMALL = (
    "model.width=32 model.depth=1 model.heads=2 train.steps=2 train.batch=4 train.micro_batch=2 train.length=16 "
    "train.evaluate_every=0"
)


def _yaml(name: str) -> list[Any]:
    return list(yaml.safe_load_all((CLUSTERS / name).read_text()))


def _job() -> Any:
    return next(each for each in _yaml("kubernetes.yaml") if each["kind"] == "Job")


def command_of(name: str, training: str) -> str:
    """What is started on a node, with `training` as what is trained."""
    if name == "kubernetes.yaml":
        (container,) = _job()["spec"]["template"]["spec"]["containers"]
        return container["command"][-1].replace("/config/train.toml log.folder=/runs/a", training)
    if name == "skypilot.yaml":
        return _yaml(name)[0]["run"].replace("examples/gpt.toml log.folder=/runs/a", training)
    before = '"$NUMBER" "$FIRST" ' if name == "two_desktops.sh" else ""
    return f"bash {shlex.quote(str(CLUSTERS / name))} {before}{training}"


def _stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder of programs that are found first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STAND_INS.items():
        _stand_in(folder, name, text)
    return folder


@pytest.mark.parametrize("name", SETS)
def test_torchrun_is_started_as_it_wants_to_be(name: str, stand_ins: Path) -> None:
    _stand_in(stand_ins, "torchrun", '#!/bin/bash\nprintf "%s\\n" "$@"\n')
    of_lab = "RANK=1 MASTER_ADDR=10.0.0.1 GLOO_SOCKET_IFNAME=eth0"
    text = f"export {of_lab}; export {SETS[name]}; {command_of(name, 'a.toml x.y=1')}"
    environment = {"PATH": f"{stand_ins}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    asked = get_args_parser().parse_args(done.stdout.splitlines())
    config, _, _ = config_from_args(asked)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (NODES, NODES, 1)
    assert asked.node_rank == 1 and asked.master_addr == "10.0.0.1"
    assert [asked.training_script, *asked.training_script_args] == ["towpath", "train", "a.toml", "x.y=1"]


def test_the_job_of_kubernetes_is_consistent() -> None:
    service = next(each for each in _yaml("kubernetes.yaml") if each["kind"] == "Service")
    job = _job()
    name, spec, pod = service["metadata"]["name"], job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    said = {each["name"]: each["value"] for each in container["env"]}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == int(said["NODES"])
    assert said["RANKS_PER_NODE"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert said["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{name}" and pod["subdomain"] == name
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


@pytest.mark.parity
@pytest.mark.parametrize("name", SETS)
def test_two_nodes_train_by_its_command(lab: Labs, tmp_path: Path, stand_ins: Path, name: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All day the barge went up the canal, and the towpath with it.\n" * 200)
    training = f"{ROOT / 'examples/gpt.toml'} log.folder={tmp_path / 'run'} {SMALL} data.text={text}"
    _stand_in(stand_ins, "torchrun", f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    # The lab starts a Python on each node; this one becomes what the scheduler would start.
    node = f"export {SETS[name]}; unset RANK WORLD_SIZE; {command_of(name, training)}"
    program = f"import os; os.execvp('bash', ['bash', '-c', {node!r}])"
    path = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = lab(NODES, 1).run(["-c", program], env=path, launcher="direct", timeout_seconds=120, capture=True)
    assert found.returncode == 0, found.output
    assert (tmp_path / "run/checkpoints").is_dir(), found.output
    assert all(link.sent_bytes > 10_000 for link in found.links), "they did not train together"
