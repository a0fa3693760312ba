"""The files of docs/how-to/launch/: keys of their schemas, and commands that run against stand-ins of a cluster."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

LAUNCH = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "launch"

# From sky/utils/schemas.py of SkyPilot 0.14.1: get_task_schema, get_resources_schema, get_storage_schema.
TASK = {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs", "secrets", "volumes"}
RESOURCES = {"infra", "accelerators", "cpus", "memory", "use_spot", "disk_size", "disk_tier", "job_recovery", "any_of"}
RECOVERY = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
STORAGE = {"name", "source", "store", "persistent", "mode", "config"}
# From the API reference of Kubernetes 1.37, batch/v1 Job and its pod template.
JOB = {"completionMode", "completions", "parallelism", "backoffLimit", "podFailurePolicy", "template"}
POD = {"subdomain", "restartPolicy", "terminationGracePeriodSeconds", "securityContext", "containers", "volumes"}
CONTAINER = {"name", "image", "command", "args", "env", "resources", "volumeMounts"}


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder of programs that stand in for those of a cluster and write down their words."""
    programs = {
        "simpletune": '[ "$2" != wrong ]',
        "torchrun": "for _ in $(seq ${LAST:-0}); do sleep 0.1; done",
        "srun": 'shift; exec "$@"',
        "scontrol": "echo node-a; echo node-b",
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in programs.items():
        file = folder / name
        first = 'trap "echo saved >> $LOG; exit 1" TERM\n' if name == "torchrun" else ""
        file.write_text(f'#!/bin/bash\n{first}echo {name} "$@" >> "$LOG"\n{body}\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return folder


def environment(cluster: Path, **more: str) -> dict[str, str]:
    log = str(cluster.parent / "log")
    return {"PATH": f"{cluster}:{os.environ['PATH']}", "LOG": log, "CONFIG": "demo", **more}


def said(cluster: Path) -> list[str]:
    return (cluster.parent / "log").read_text().splitlines()


def launched(cluster: Path) -> Any:
    """What torchrun makes of its words: of torch's own parser, which refuses unknown ones."""
    from torch.distributed.run import get_args_parser

    (words,) = [line for line in said(cluster) if line.startswith("torchrun ")]
    return get_args_parser().parse_args(shlex.split(words)[1:])


def require_training(args: Any, nodes: str, cards: str, head: str, state: str | None) -> None:
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == (nodes, cards, "c10d")
    assert args.rdzv_endpoint == f"{head}:29500" and args.max_restarts >= 3 and args.rdzv_id
    assert args.module and args.training_script == "simpletune"
    words = args.training_script_args
    assert words[:2] == ["train", "demo"] and words[words.index("--resume") + 1] == "auto"
    assert state is None or words[-2:] == [f"output.runs={state}/runs", f"output.cache={state}/cache"]


def test_accelerate_reads_its_file() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(LAUNCH / "accelerate.yaml"))
    assert (config.distributed_type, config.num_processes, config.mixed_precision) == ("MULTI_GPU", 8, "no")


def test_skypilot(cluster: Path) -> None:
    (task,) = read("skypilot.yaml")
    resources = task["resources"]
    assert set(task) <= TASK and set(resources) <= RESOURCES and set(resources["job_recovery"]) <= RECOVERY
    assert resources["use_spot"] is True and resources["job_recovery"]["strategy"] in ("EAGER_NEXT_REGION", "FAILOVER")
    assert set(task["file_mounts"]["/state"]) <= STORAGE and task["file_mounts"]["/state"]["mode"] == "MOUNT_CACHED"
    given = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)
    done = subprocess.run(["bash", "-c", task["run"]], env=environment(cluster, **given), cwd=cluster)
    assert done.returncode == 0
    require_training(launched(cluster), "2", "8", "10.0.0.1", "/state")


def test_kubernetes(cluster: Path) -> None:
    service, job = read("kubernetes.yaml")
    assert (service["kind"], service["spec"]["clusterIP"], job["apiVersion"]) == ("Service", "None", "batch/v1")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert set(spec) <= JOB and set(pod) <= POD and set(container) <= CONTAINER
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    assert pod["restartPolicy"] == "Never", "podFailurePolicy needs it"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["selector"] == {
        "batch.kubernetes.io/job-name": job["metadata"]["name"]
    }
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    command = [*container["command"], *container["args"]]
    assert subprocess.run(command, env=environment(cluster), cwd=cluster).returncode == 0
    require_training(launched(cluster), "2", "8", "simpletune-0.simpletune", "/state")
    fails = {
        value
        for rule in spec["podFailurePolicy"]["rules"]
        for value in rule.get("onExitCodes", {"values": []})["values"]
    }
    assert subprocess.run(command, env=environment(cluster, CONFIG="wrong"), cwd=cluster).returncode in fails


def slurm(cluster: Path, *words: str, **more: str) -> subprocess.Popen[bytes]:
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]", **more}
    return subprocess.Popen(["bash", str(LAUNCH / "slurm.sbatch"), *words], env=environment(cluster, **given))


def requeued(cluster: Path) -> bool:
    return "scontrol requeue 7" in said(cluster)


def catches(pid: int, number: signal.Signals) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def test_slurm_trains_once(cluster: Path) -> None:
    script = (LAUNCH / "slurm.sbatch").read_text()
    assert "#SBATCH --requeue" in script and "#SBATCH --signal=B:USR1@180" in script
    assert slurm(cluster, "demo", "train.steps=9").wait(120) == 0 and not requeued(cluster)
    assert "train.steps=9" in launched(cluster).training_script_args
    require_training(launched(cluster), "2", "8", "node-a", None)
    assert slurm(cluster, "wrong").wait(120) == 2 and len([s for s in said(cluster) if s.startswith("torchrun")]) == 1


@pytest.mark.parametrize("number, again", [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_slurm_saves_at_a_signal_and_queues_again_only_if_time_is_over(
    number: signal.Signals, again: bool, cluster: Path
) -> None:
    job = slurm(cluster, "demo", LAST="3000")
    late = time.monotonic() + 120
    while not (cluster.parent / "log").exists() or not any(s.startswith("torchrun") for s in said(cluster)):
        assert time.monotonic() < late
        time.sleep(0.02)
    while not (catches(job.pid, signal.SIGUSR1) and catches(job.pid, signal.SIGTERM)):
        assert time.monotonic() < late
        time.sleep(0.02)
    job.send_signal(number)
    assert job.wait(120) == 1
    assert "saved" in said(cluster) and requeued(cluster) == again
