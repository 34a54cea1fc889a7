"""What ranks find in their environment, and how many threads they get."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest

from tests.launch.conftest import Launch
from tilework import huge_pages
from tilework.cores import cpu_quota, threads_per_rank, usable_cores
from tilework.launch.environment import Rendezvous, rank_environment
from tilework.launch.settings import LaunchSettings

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
RENDEZVOUS = Rendezvous(secret="ab", store="unix:@name")


def test_names_are_torchruns() -> None:
    found = rank_environment(LaunchSettings(nprocs=4), 3, RENDEZVOUS, {"OMP_NUM_THREADS": "1"})
    assert found == {
        "OMP_NUM_THREADS": "1",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "TILEWORK_SECRET": "ab",
        "TILEWORK_STORE": "unix:@name",
    }


def test_settings_become_variables() -> None:
    settings = LaunchSettings(nprocs=2, backend="gloo", timeout=timedelta(seconds=1.5))
    found = rank_environment(settings, 0, RENDEZVOUS, {})
    assert (found["TILEWORK_BACKEND"], found["TILEWORK_TIMEOUT"]) == ("gloo", "1.5")


def test_tensors_ask_for_huge_pages_if_that_is_wanted() -> None:
    def asked(wanted: bool | None) -> str | None:
        settings = LaunchSettings(nprocs=1, huge_pages=wanted)
        return rank_environment(settings, 0, RENDEZVOUS, base).get(huge_pages.VARIABLE)

    base: dict[str, str] = {}
    assert [asked(wanted) for wanted in (None, True, False)] == [None, "1", "0"]
    base[huge_pages.VARIABLE] = "1"
    assert [asked(wanted) for wanted in (None, True, False)] == ["1", "1", "0"]


def test_the_kernels_policy_is_read(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert huge_pages.offered(folder=tmp_path) == "madvise"
    assert huge_pages.offered("shmem_enabled", tmp_path) == ""


def test_another_launchers_variables_are_dropped() -> None:
    base = {"MASTER_ADDR": "far", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/"}
    found = rank_environment(LaunchSettings(nprocs=2), 0, RENDEZVOUS, base)
    assert {name for name in base if name in found} == {"HOME"}


def test_secret_is_not_in_the_representation() -> None:
    assert "ab" not in repr(Rendezvous(secret="ab"))


def test_every_rank_gets_its_own_environment(launch: Launch, start: str) -> None:
    done = launch(PRINT_ENVIRONMENT, "-n", "3", "--start", start, "--timeout", "7")
    ranks = [json.loads(line[4:]) for line in done.lines]
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2"]
    assert {rank["TILEWORK_TIMEOUT"] for rank in ranks} == {"7"}
    (secret,) = {rank["TILEWORK_SECRET"] for rank in ranks}
    assert len(bytes.fromhex(secret)) == 32
    assert all("MASTER_ADDR" not in rank and "TILEWORK_BACKEND" not in rank for rank in ranks)


def test_secrets_are_fresh(launch: Launch) -> None:
    text = "import os; print(os.environ['TILEWORK_SECRET'], os.environ['TILEWORK_STORE'])"
    first, second = (launch(text, "-n", "1").out.split() for _ in range(2))
    assert not {*first} & {*second}


def test_ranks_share_the_launchers_store(launch: Launch, start: str) -> None:
    done = launch(
        """
        import os
        from tilework.store import UnixStore
        address = os.environ["TILEWORK_STORE"].removeprefix("unix:")
        store = UnixStore(address, secret=bytes.fromhex(os.environ["TILEWORK_SECRET"]))
        store.set(f"from-{os.environ['RANK']}", "hello")
        print(store.get(f"from-{1 - int(os.environ['RANK'])}"))
        """,
        "--start",
        start,
    )
    assert done.lines == ["[0] b'hello'", "[1] b'hello'"]


def test_tcp_leaves_the_port_to_rank_0(launch: Launch) -> None:
    done = launch(
        """
        import os, socket
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        assert "TILEWORK_STORE" not in os.environ
        if os.environ["RANK"] == "0":
            socket.socket().bind(address)
        print(address[0])
        """,
        "--tcp",
    )
    assert (done.lines, done.err) == (["[0] 127.0.0.1", "[1] 127.0.0.1"], "")


def test_ranks_that_may_be_started_again_meet_at_the_launcher_s_store(launch: Launch) -> None:
    """And a port is there for torch's own groups."""
    done = launch(
        """
        import os
        from tilework.rendezvous import rendezvous
        from tilework.store import UnixStore
        master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        assert master == os.environ["TILEWORK_MASTER"]
        store, rank, size = next(rendezvous("env://"))
        assert isinstance(store, UnixStore), store
        print(rank, size)
        store.close()
        """,
        *("--tcp", "--restarts", "1"),
    )
    assert (done.lines, done.err) == (["[0] 0 2", "[1] 1 2"], "")


def test_master_port_is_the_one_asked_for(launch: Launch) -> None:
    done = launch("import os; print(os.environ['MASTER_PORT'])", "--master-port", "29511")
    assert done.lines == ["[0] 29511", "[1] 29511"]


def test_scripts_for_torch_distributed_run(launch: Launch) -> None:
    launch.with_torch()
    done = launch(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        print(tensor.item(), torch.get_num_threads())
        dist.destroy_process_group()
        """,
        "--tcp",
    )
    threads = max(1, usable_cores() // 2)
    assert (done.status, done.lines) == (0, [f"[{rank}] 2.0 {threads}" for rank in range(2)])


@pytest.mark.parametrize(("chosen", "expected"), [(None, None), ("7", "7")])
def test_threads_are_shared_out_unless_the_user_chose(
    launch: Launch, chosen: str | None, expected: str | None
) -> None:
    if chosen is not None:
        launch.environment["OMP_NUM_THREADS"] = chosen
    done = launch("import os; print(os.environ['OMP_NUM_THREADS'])", "-n", "1")
    assert done.out.strip() == (expected or str(usable_cores()))


def test_no_rank_is_left_without_a_thread() -> None:
    assert threads_per_rank(1000, {}) == 1


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/job/step", {"job/cpu.max": "150000 100000"}, 1.5),
        ("0::/job", {"job/cpu.max": "max 100000"}, None),
        ("0::/job", {"job/cpu.max": "400000 100000", "cpu.max": "100000 100000"}, 1.0),
        ("0::/elsewhere", {"cpu.max": "50000 100000"}, 0.5),
        (
            "4:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "20000", "cpu,cpuacct/a/cpu.cfs_period_us": "10000"},
            2.0,
        ),
        (
            "4:cpu:/a",
            {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "10000"},
            None,
        ),
        ("4:memory:/a", {"memory/a/cpu.max": "1 1"}, None),
    ],
)
def test_quota_of_control_groups(
    tmp_path: Path, membership: str, files: dict[str, str], expected: float | None
) -> None:
    for name, text in {"../../../proc/self/cgroup": membership, **files}.items():
        path = Path(os.path.normpath(tmp_path / "sys/fs/cgroup" / name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert cpu_quota(tmp_path) == expected


def test_cores_are_bounded_by_the_quota(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("10000 100000\n")
    assert usable_cores(tmp_path) == 1
