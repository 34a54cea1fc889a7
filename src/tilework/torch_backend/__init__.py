"""tilework as a backend of torch.distributed.

Importing this module registers the name ``tilework``, so a program that uses torch.distributed
runs on tilework's process groups by one line and one word::

    import tilework.torch_backend
    torch.distributed.init_process_group("tilework")

torch's DistributedDataParallel, FSDP, DTensor, checkpoints, functional collectives and whatever
else calls torch.distributed then communicate through it. ``"cpu:tilework,cuda:nccl"`` leaves other
devices to torch's own engines. Ranks of one host share memory; elsewhere the backend is chosen as
:func:`tilework.distributed.init_process_group` chooses it.

Importing it also lets torch's ``env://`` find the ranks of ``tilework run``, mpirun and srun where
no ``MASTER_ADDR`` is set. See docs/how-to/torch-programs.md.
"""

from __future__ import annotations

import torch.distributed as torch_dist

if not torch_dist.is_available():
    raise ImportError(
        "tilework.torch_backend needs a torch that was built with torch.distributed; "
        "tilework.distributed works without"
    )

from tilework.torch_backend.group import BACKEND_NAME, TorchProcessGroup
from tilework.torch_backend.rendezvous import install_env_rendezvous

torch_dist.Backend.register_backend(
    BACKEND_NAME, TorchProcessGroup, extended_api=True, devices=["cpu"]
)
install_env_rendezvous()

__all__ = ["BACKEND_NAME", "TorchProcessGroup"]
