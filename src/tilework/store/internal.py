"""Names that the other packages of tilework use, besides the public names."""

from tilework.store.address import Address, TcpAddress, UnixAddress
from tilework.store.arrivals import Arrivals
from tilework.store.barrier import Barrier, meet
from tilework.store.checks import MAX_INTEGER, answers_within, first_few, left_seconds, positive
from tilework.store.late_notice import LateNotice, ranks_in_words
from tilework.store.pool import while_connecting
