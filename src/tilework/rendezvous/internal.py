"""Names that the other packages of tilework use, besides the public names."""

from tilework.rendezvous.handlers import (
    env_rendezvous,
    launcher_serves,
    launcher_store,
    name_master,
    outlives_ranks,
    starting,
)
from tilework.rendezvous.liveness import (
    ENDS_VARIABLE,
    EndedRanks,
    has_ended,
    process_identity,
    status_of,
    thread_identity,
)
from tilework.rendezvous.siblings import MultiprocessingChildren, Siblings
