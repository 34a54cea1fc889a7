"""Names that the other packages of tilework use."""

from tilework.comm.debug import (
    DebugLevel,
    get_debug_level,
    logger,
    set_debug_level,
    set_debug_level_from_env,
)
from tilework.comm.flight.ring import RUNNING, Entry, Tail, Timed, What, describe
from tilework.comm.flight.stragglers import (
    LEAST_OPERATIONS,
    LEAST_SECONDS,
    RATIO,
    Straggler,
    own_times,
    slowest,
    stragglers,
    without,
)
from tilework.comm.per_call.call_recorder import (
    CallRecorder,
    current_recorder,
    recorded,
    refuse_count,
    set_recorder,
    unrecorded,
)
from tilework.comm.per_call.callbacks import run_soon
from tilework.comm.per_call.callsite import (
    Site,
    call_site,
    format_site,
    in_library,
    stacks_of_threads,
    user_frame,
)
from tilework.comm.per_call.checks import address_of, awaited, device_kind, has_memory, lacks_memory
from tilework.comm.per_call.profiling import listening, record_comm
from tilework.comm.per_call.torch_names import ATTRIBUTE, torch_names
from tilework.comm.pretence import (
    JobValues,
    MeetingCost,
    Pretence,
    PretendedCall,
    Sizes,
    current_pretence,
    pretending,
)
from tilework.comm.waits.by_rank import AFTER_SECONDS
