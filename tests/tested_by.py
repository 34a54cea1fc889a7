"""The tests of source modules that have no test module of their own name.

Such a module is an inner part of a package, which tests reach through the package's public names.
A row has a folder of the package, patterns of modules below it, and what fails if one of these is
wrong: test modules in the folder of tests of that name, or from ``/`` on in ``tests``; a folder
stands for all of its modules. The first row that fits a module counts.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import PurePath

_ROWS = (
    ("", "cores", "launch/test_binding launch/test_environment"),
    ("", "errors", "faults/test_raising launch/test_spawn checkpoint/test_reading"),
    ("", "huge_pages", "launch/test_environment comm/backends/shm/test_calibration"),
    ("", "from_torch", "torch_names/test_signatures"),
    # A captured step needs all parts of the package.
    ("capture", "program/python_code program/number", "program test_program"),
    ("capture", "recording/*", "recording/test_places test_program"),
    ("capture", "*", "program/test_skeleton test_program"),
    ("checkpoint", "formats/*", "formats"),
    ("checkpoint", "composing safetensors_*", "test_published test_publishing"),
    ("checkpoint", "verifying", "test_manager test_command"),
    ("checkpoint", "loading", "test_api test_host_load test_saving_faults"),
    ("checkpoint", "ranks tensor_bytes", "test_api test_asynchronous"),
    ("checkpoint", "*", "test_api test_any_state test_stateful_objects"),
    ("comm", "backends/pretend pretence", "/plan/test_job /plan/test_mismatches"),
    # A backend's parts are tested by the contract, which each backend has to fulfil.
    ("comm", "backends/hybrid/* backends/control_channel", "backends/hybrid/test_hybrid_backend"),
    ("comm", "backends/threads/*", "backends/threads test_contract"),
    ("comm", "backends/* operations/*", "test_contract backends/hybrid/test_hybrid_backend"),
    ("comm", "flight/*", "flight/test_diagnosis flight/test_dump /launch/test_failure_report"),
    ("comm", "functional/*", "functional"),
    ("comm", "per_call/*", "/capture/recording/test_group_calls /dtensor/test_like_torch"),
    ("comm", "transfer/*", "transfer/test_run"),
    ("comm", "*", "test_groups"),
    ("distributed", "nn/*", "/comm/functional/test_running_groups"),
    ("distributed", "*", "test_like_torch"),
    ("dtensor", "autograd/*", "autograd/test_gradients"),
    ("dtensor", "construction/creation random/*", "random"),
    ("dtensor", "debug/*", "debug/test_causes test_like_torch"),
    # Every operator runs through these.
    (
        "dtensor",
        "dispatch/* propagation/op_sharding",
        "dispatch/test_call test_verify /csrc/python",
    ),
    ("dtensor", "propagation/*", "rules/test_linear propagation"),
    ("dtensor", "provenance/*", "provenance"),
    ("dtensor", "redistribution/* spec", "redistribution test_api"),
    # Tests of rules are named after the kind of operators that a program sees.
    ("dtensor", "rules/cross_entropy", "rules/test_losses"),
    ("dtensor", "rules/multihead", "rules/test_attention"),
    ("dtensor", "rules/index* rules/scatter rules/slicing", "rules/test_indexing"),
    ("dtensor", "rules/new_like rules/random_ops", "random/test_generator rules/test_elementwise"),
    ("dtensor", "rules/concatenation", "rules/test_reshaping rules/test_concatenation"),
    ("dtensor", "rules/*", "rules/test_reductions"),
    ("dtensor", "views/*", "views/test_moved_views"),
    ("dtensor", "*", "test_api /torch_backend/test_dtensors"),
    ("launch", "command doctor", "/test_cli"),
    ("launch", "seating elastic_nodes", "test_store_service"),
    ("launch", "fail*", "test_failure_text test_supervise"),
    ("launch", "*", "test_spawn test_supervise test_program /test_cli"),
    ("layout", "box_columns cuts", "test_tiling_validation test_box_columns"),
    ("layout", "*search*", "test_steps test_cost"),
    ("layout", "*", "test_planning test_collective"),
    ("mesh", "*", "test_device_mesh test_grid"),
    ("parallel", "comm_hooks/*", "comm_hooks test_comm_hooks"),
    ("parallel", "data_parallel/*", "data_parallel/test_ddp data_parallel/test_ddp_changes"),
    # Each step of a fully sharded module needs all parts of the package.
    ("parallel", "fully_sharded/*", "fully_sharded"),
    (
        "parallel",
        "pipelines/actions pipelines/listing pipelines/notation",
        "pipelines/test_schedule",
    ),
    ("parallel", "pipelines/batches", "pipelines/test_stages"),
    ("parallel", "resilient/*", "resilient"),
    ("parallel", "tensor_parallel/*", "tensor_parallel/test_styles tensor_parallel/test_deriving"),
    ("plan", "*", "test_job test_mismatches"),
    ("rendezvous", "*", "test_environment test_handlers_registry"),
    ("rpc", "*", "test_calls test_bootstrap test_payload"),
    ("sharded", "ops/*", "ops"),
    ("sharded", "*", "test_tensor test_tensor_saved test_optim"),
    # All stores fulfil one contract; the server is tested beside it.
    ("store", "log", "test_file"),
    ("store", "*", "test_contract test_server"),
    # These are tests themselves: the contracts of groups and of stores.
    ("testing", "groups/*", "/comm/test_contract"),
    ("torch_backend", "devices", "test_group"),
    ("testing", "storages", "/checkpoint/test_storage_contract"),
    ("testing", "stores", "/store/test_contract"),
    # Rules that both kinds of tensors share.
    ("tiled", "rules/linalg", "/dtensor/rules/test_linalg"),
    ("tiled", "rules/convolution", "/dtensor/rules/test_convolution"),
    ("tiled", "rules/rearranging", "/dtensor/rules/test_reshaping"),
    ("tiled", "rules/*", "/dtensor/rules/test_reductions /sharded/ops"),
    ("tiled", "*", "test_box_propagation test_op_table"),
)


def row_of(module: PurePath) -> int | None:
    """The number of the first row that fits a module below ``src/tilework``, if any."""
    name = module.with_suffix("").as_posix()
    for number, (folder, patterns, _) in enumerate(_ROWS):
        if any(fnmatch(name, f"{folder}/{each}".lstrip("/")) for each in patterns.split()):
            return number
    return None


def guards(number: int) -> list[str]:
    """The test modules of a row, and folders of them, below ``tests``."""
    folder, _, tests = _ROWS[number]
    paths = [
        each[1:] if each[0] == "/" else f"{folder}/{each}".lstrip("/") for each in tests.split()
    ]
    return [f"{path}.py" if path.rpartition("/")[2].startswith("test_") else path for path in paths]


ROWS = range(len(_ROWS))
