"""Names that the other packages of tilework use, besides the public names."""

from tilework.rendezvous.ended_ranks import ENDS_VARIABLE, EndedRanks
from tilework.rendezvous.handlers import (
    env_rendezvous,
    launcher_serves,
    launcher_store,
    name_master,
    starting,
)
from tilework.rendezvous.liveness import has_ended, process_identity, thread_identity
from tilework.rendezvous.multiprocessing_children import MultiprocessingChildren
from tilework.rendezvous.siblings import Siblings
