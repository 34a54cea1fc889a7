"""env://: each variable, each launcher, each mistake."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch._C._distributed_c10d as c10d

from tests.store.client_process import process
from tests.tables import each
from tilework.errors import DistNetworkError
from tilework.rendezvous import Settings, detect_environment, handlers, rendezvous
from tilework.rendezvous.environment import first_host
from tilework.store import HashStore, PrefixStore, Store, StoreServer, TCPStore, UnixStore
from tilework.testing.stores import Background

LAUNCHERS = ("RANK", "WORLD", "LOCAL", "MASTER", "TILEWORK", "TORCHELASTIC", "OMPI", "PMI", "SLURM")
SetEnv = Callable[..., None]


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetEnv]:
    """Sets variables, in an environment without any launcher's."""
    for name in list(os.environ):
        if name.startswith((*LAUNCHERS, "MPI_")) or name == "ENVIRONMENT":
            monkeypatch.delenv(name)
    monkeypatch.setattr(handlers, "_held", {})

    def set_variables(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    yield set_variables
    for server in handlers._held.values():
        server.close()


@pytest.fixture
def free_port() -> int:
    with StoreServer.listen_tcp("127.0.0.1", 0) as server:
        return server.port


def meet(url: str = "env://", seconds: float = 120) -> tuple[Store, int, int]:
    return next(rendezvous(url, timeout=timedelta(seconds=seconds)))


# By hand.


def test_the_four_variables(env: SetEnv, free_port: int) -> None:
    env(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    store, rank, size = meet()
    assert (rank, size, type(store)) == (0, 2, TCPStore)
    env(RANK=1)
    other, rank, size = meet()
    assert (rank, size) == (1, 2)
    store.set("k", "v")
    assert other.get("k") == b"v"
    store.close()
    other.close()


def test_the_query_comes_first(env: SetEnv, free_port: int) -> None:
    env(RANK=7, WORLD_SIZE=9, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    store, rank, size = meet("env://?rank=0&world_size=1")
    assert (rank, size) == (0, 1)
    store.close()


def test_arguments_stand_in_for_variables(env: SetEnv, free_port: int) -> None:
    env(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    store, rank, size = next(rendezvous("env://", 0, 1))
    assert (rank, size) == (0, 1)
    store.close()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_what_is_missing_is_named_with_advice(env: SetEnv, missing: str) -> None:
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    del variables[missing]
    env(**variables)
    with pytest.raises(ValueError, match=rf"{missing} \(.*not set.*`tilework run`") as caught:
        meet()
    others = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - {missing}
    assert not any(f" {name} " in str(caught.value) for name in others)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("RANK", "x", "RANK must be an integer, got 'x'"),
        ("RANK", "", "RANK must be an integer, got ''"),
        ("RANK", "-1", "rank -1 of 2"),
        ("RANK", "2", "rank 2 of 2"),
        ("WORLD_SIZE", "two", "WORLD_SIZE must be an integer, got 'two'"),
        ("WORLD_SIZE", "0", "rank 0 of 0"),
        ("MASTER_PORT", "http", "MASTER_PORT must be an integer, got 'http'"),
        ("MASTER_PORT", "0", "MASTER_PORT must be between 1 and 65535, got 0"),
        ("MASTER_PORT", "70000", "MASTER_PORT must be between 1 and 65535, got 70000"),
        ("TILEWORK_SECRET", "xyz", "TILEWORK_SECRET must be .*hexadecimal"),
    ],
)
def test_what_is_malformed_is_named(env: SetEnv, name: str, value: str, match: str) -> None:
    env(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500)
    env(**{name: value})
    with pytest.raises(ValueError, match=match):
        meet()


def test_a_malformed_secret_is_not_shown(env: SetEnv) -> None:
    env(RANK=0, WORLD_SIZE=1, TILEWORK_STORE="unix:@x", TILEWORK_SECRET="nearly-secret")
    with pytest.raises(ValueError, match="TILEWORK_SECRET") as caught:
        meet()
    assert "nearly" not in str(caught.value)


def test_the_master_address_must_be_rank_0s(env: SetEnv) -> None:
    env(RANK=0, WORLD_SIZE=1, MASTER_ADDR="192.0.2.1", MASTER_PORT=29500)
    with pytest.raises(DistNetworkError, match="not an address of this machine"):
        meet()


def test_a_second_meeting_finds_the_same_server(env: SetEnv, free_port: int) -> None:
    env(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    first, _, _ = meet()
    env(RANK=1)
    early, _, _ = meet()
    env(RANK=0)
    first.close()
    second, _, _ = meet()
    second.set("k", "v")
    assert early.get("k") == b"v"
    second.close()
    early.close()


# Alone


def test_without_a_launcher_there_is_one_rank(
    env: SetEnv, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_said_alone", set())
    monkeypatch.setattr("sys.argv", ["/somewhere/train.py"])
    for url in ("env://", "env://?rank=0", "env://?world_size=1"):
        store, rank, size = meet(url)
        assert (type(store), rank, size) == (HashStore, 0, 1)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert "rank 0 of 1" in said[0]
    assert "tilework run -n 2 train.py" in said[0]


@pytest.mark.parametrize("query", ["world_size=2", "rank=1", "rank=0&world_size=2"])
def test_who_asks_for_others_is_not_alone(env: SetEnv, query: str) -> None:
    with pytest.raises(ValueError, match=r"not set.*`tilework run`"):
        meet(f"env://?{query}")


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"RANK": 0, "WORLD_SIZE": 2, "TILEWORK_STORE": "unix:@x"}, "tilework run"),
        ({"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 2}, "mpirun"),
    ],
)
def test_more_ranks_than_were_started_are_refused(
    env: SetEnv, variables: dict[str, object], launcher: str
) -> None:
    env(**variables, TILEWORK_SECRET="0a" * 16)
    with pytest.raises(ValueError, match=f"world_size=8 .* but {launcher} has started 2"):
        meet("env://?rank=0&world_size=8")


# tilework run


def test_the_launchers_store(env: SetEnv) -> None:
    address = f"@tilework-test-{uuid.uuid4().hex}"
    env(RANK=1, WORLD_SIZE=2, TILEWORK_STORE=f"unix:{address}", TILEWORK_SECRET="0a" * 16)
    with StoreServer.listen_unix(address, b"\n" * 16) as server:
        server.start()
        store, rank, size = meet()
        assert (type(store), rank, size) == (UnixStore, 1, 2)
        store.close()


def test_a_master_address_comes_before_the_launchers_store(env: SetEnv, free_port: int) -> None:
    env(RANK=0, WORLD_SIZE=1, TILEWORK_STORE="unix:@nobody", TILEWORK_SECRET="0a" * 16)
    env(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    store, _, _ = meet()
    assert isinstance(store, TCPStore)
    assert store.authenticated
    store.close()


@pytest.mark.parametrize("value", ["@name", "tcp:h:1", "unix:name", "unix:"])
def test_a_malformed_launchers_store(env: SetEnv, value: str) -> None:
    env(RANK=0, WORLD_SIZE=1, TILEWORK_STORE=value)
    with pytest.raises(ValueError, match=r"TILEWORK_STORE must be unix:@name or unix:/path"):
        meet()


# torchrun


def test_the_store_of_torchrun(env: SetEnv) -> None:
    theirs = c10d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=theirs.port)
    env(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="r")
    env(TORCHELASTIC_RESTART_COUNT=1)
    store, _, _ = meet()
    store.set("k", "v")
    assert isinstance(store, PrefixStore)
    assert theirs.get("tilework/r/1/k") == b"v"


def test_torchrun_is_gone(env: SetEnv, free_port: int) -> None:
    env(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    env(TORCHELASTIC_USE_AGENT_STORE="True")
    with pytest.raises(DistNetworkError, match=rf"torchrun's store at 127\.0\.0\.1:{free_port}"):
        meet(seconds=1)


def test_without_a_store_of_torchruns_rank_0_serves(env: SetEnv, free_port: int) -> None:
    env(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    env(TORCHELASTIC_USE_AGENT_STORE="False")
    store, _, _ = meet()
    assert isinstance(store, TCPStore)
    store.close()


# mpirun and SLURM

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": 1,
    "OMPI_COMM_WORLD_SIZE": 4,
    "OMPI_COMM_WORLD_LOCAL_RANK": 1,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 4,
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
HYDRA = {"PMI_RANK": 1, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 4}
SLURM = {
    "SLURM_PROCID": 1,
    "SLURM_NTASKS": 4,
    "SLURM_LOCALID": 1,
    "SLURM_NODELIST": "node1",
    "SLURM_JOB_ID": 17,
    "SLURM_STEP_ID": 0,
}


def strings(variables: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in variables.items()}


@each("variables", [OPEN_MPI, HYDRA, SLURM])
def test_launchers_are_detected(variables: dict[str, object]) -> None:
    settings = detect_environment(strings(variables))
    assert settings is not None
    assert (settings.rank, settings.world_size) == (1, 4)
    assert (settings.local_rank, settings.local_world_size) == (1, 4)
    assert settings.single_host
    assert settings.job


def test_nothing_is_detected_where_nothing_is() -> None:
    assert detect_environment({}) is None
    assert detect_environment({"RANK": "1"}) is None


def test_rank_and_world_size_come_first() -> None:
    mine: dict[str, object] = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    settings = detect_environment(strings(SLURM | mine))
    assert settings == Settings("RANK", 0, 2, 0, 2)


@pytest.mark.parametrize(
    ("extra", "launcher"),
    [({"TORCHELASTIC_RUN_ID": "r"}, "torchrun"), ({"TILEWORK_SECRET": "00"}, "tilework run")],
)
def test_who_set_them(extra: dict[str, str], launcher: str) -> None:
    settings = detect_environment({"RANK": "0", "WORLD_SIZE": "1"} | extra)
    assert settings is not None
    assert settings.launcher == launcher


def test_mpirun_inside_a_slurm_allocation_is_mpiruns() -> None:
    batch: dict[str, object] = SLURM | {"SLURM_PROCID": 0}
    settings = detect_environment(strings(batch | HYDRA))
    assert settings is not None
    assert (settings.launcher, settings.rank) == ("mpirun", 1)


def test_a_slurm_batch_script_is_no_rank() -> None:
    batch: dict[str, object] = SLURM | {"ENVIRONMENT": "BATCH"}
    del batch["SLURM_STEP_ID"]
    assert detect_environment(strings(batch)) is None


def test_several_slurm_nodes() -> None:
    nodes: dict[str, object] = {
        "SLURM_NODELIST": "gpu[07-09],x",
        "SLURM_NNODES": 4,
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_NODEID": 2,
    }
    settings = detect_environment(strings(SLURM | nodes))
    assert settings is not None
    assert (settings.host, settings.local_world_size, settings.single_host) == ("gpu07", 1, False)


@each(
    ("nodes", "host"),
    [
        ("a", "a"),
        ("a1,a2", "a1"),
        ("a[1-3,7]", "a1"),
        ("a[01,02],b", "a01"),
        ("a[1]b[2-3]", "a1b2"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    "variables",
    [OPEN_MPI | {"OMPI_COMM_WORLD_RANK": 4}, HYDRA | {"PMI_RANK": -1}],
)
def test_impossible_ranks_are_refused(variables: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"mpirun gave rank .* of 4"):
        detect_environment(strings(variables))


def test_a_launchers_variable_must_be_a_number() -> None:
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK must be an integer, got 'x'"):
        detect_environment(strings(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}))


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (HYDRA | {"PMI_JOBID": "17"}, "PMI_RANK"),
        (SLURM, "SLURM_PROCID"),
    ],
    ids=["ompi", "hydra", "slurm"],
)
def test_ranks_of_one_host_meet_by_the_jobs_name(
    env: SetEnv, variables: dict[str, object], rank: str, request: pytest.FixtureRequest
) -> None:
    job = uuid.uuid4().hex
    env(**variables | dict.fromkeys(("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID"), job))
    env(**{rank: 0})
    first, number, size = meet()
    assert (type(first), number, size) == (UnixStore, 0, 4)
    env(**{rank: 3})
    second, number, _ = meet()
    second.set("k", "v")
    assert (number, first.get("k")) == (3, b"v")
    first.close()
    second.close()


def test_slurm_nodes_meet_at_the_first_host(env: SetEnv) -> None:
    env(**SLURM | {"SLURM_NODELIST": "localhost,node[2-3]", "SLURM_PROCID": 0})
    env(SLURM_JOB_ID=uuid.uuid4().int)
    store, _, _ = meet()
    assert isinstance(store, TCPStore)
    assert store.host == "localhost"
    assert handlers._FIRST_PORT <= store.port < handlers._FIRST_PORT + handlers._PORTS
    store.close()


def test_mpirun_over_several_hosts_needs_an_address(env: SetEnv) -> None:
    env(**OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": 2})
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        meet()


def test_mpirun_takes_a_given_address(env: SetEnv, free_port: int) -> None:
    env(**OPEN_MPI | {"OMPI_COMM_WORLD_RANK": 0})
    env(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    store, rank, size = meet()
    assert (type(store), rank, size) == (TCPStore, 0, 4)
    store.close()


def test_a_real_second_process(env: SetEnv, free_port: int) -> None:
    env(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    program = """
        os.environ["RANK"] = "0"
        from tilework.rendezvous import rendezvous
        store, rank, size = next(rendezvous("env://"))
        store.set("k", f"from {rank} of {size}")
        store.get("end")
    """
    with process(program) as other:
        call = Background(lambda: meet(seconds=120))
        store, _, _ = call.result()
        assert store.get("k") == b"from 0 of 2"
        store.set("end", "")
        assert other.wait() == 0
        store.close()
