"""Making and ending process groups."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

from tilework.comm.agreement import agree_equal
from tilework.comm.backend import Backend, BackendConfig, core_error
from tilework.comm.contract import ProcessGroup, seconds_of
from tilework.comm.elastic.grow import grow, rejoin
from tilework.comm.elastic.grow import tickets_waiting as tickets_waiting
from tilework.comm.elastic.shrink import shrink
from tilework.comm.elastic.ticket_store import REJOIN_VARIABLE
from tilework.comm.elastic.ticket_store import note_event as note_event
from tilework.comm.making.group_plan import GroupPlan as GroupPlan
from tilework.comm.making.group_plan import identity_on, told_to_all
from tilework.comm.making.init_generation import InitGeneration
from tilework.comm.making.meeting import counted
from tilework.comm.making.rank_watch import BLOCK, RankWatch
from tilework.comm.per_call.callsite import call_site
from tilework.comm.pretence import Pretence, PretendedCall, current_pretence
from tilework.comm.waits.cycles import notice_cycles
from tilework.comm.waits.group import GroupWait, lack_of_means
from tilework.comm.waits.late import notice_late_ranks
from tilework.comm.world import (
    AnyGroup,
    GroupMember,
    NonMember,
    World,
    current_world,
    get_rank,
    resolve,
)
from tilework.errors import CollectiveMismatchError
from tilework.rendezvous import rendezvous
from tilework.rendezvous.internal import EndedRanks
from tilework.store import HashStore, PrefixStore, Store
from tilework.store.internal import Barrier, answers_within, meet

#: The time that an operation may wait for other ranks unless another is given.
DEFAULT_TIMEOUT = timedelta(minutes=30)
DEFAULT_GROUP_NAME = "default"
#: The most ranks that ranks tell each other one by one.
_RANKS_IN_FULL = 16


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Make the default group. Collective over all ranks of the job; blocks until all ranks came.

    Args:
        backend: A backend's name, or pairs like "cpu:shm,cuda:nccl". None: the backend of
            ``tilework run --backend``; else shm if all ranks share one host, hybrid if they do not
            (and nccl for cuda tensors if there is a GPU).
        init_method: A URL to meet at; None means "env://". Not together with ``store``.
        timeout: The time that an operation may wait for other ranks; None: the time of ``tilework
            run --timeout``, else 30 minutes. A dead rank is noticed at once, whatever the timeout.
        world_size: The number of ranks; needed with ``store``.
        rank: This rank's number; needed with ``store``.
        store: A store that all ranks see, to meet at.
        group_name: The group's name in messages.
        pg_options: Handed to the backend.
        device_id: Accepted for torch's sake; devices are taken from tensors.

    Raises:
        ValueError: Contradictory or missing arguments or settings, or a second call.
        DistStoreError, DistNetworkError: The ranks could not meet in time.
        DistBackendError: The backend cannot be used, or some rank did not come in time.
        CollectiveMismatchError: Ranks called with different arguments, or two processes say
            that they are the same rank.

    Example:
        >>> import tilework.distributed as dist
        >>> dist.init_process_group("threads", store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.get_world_size()
        1
        >>> dist.destroy_process_group()
    """
    world, pretence = current_world(), current_pretence()
    if pretence is not None and pretence.is_early:
        pretence.is_early = False
        return
    if world.default_group is not None:
        raise ValueError(
            "trying to initialize the default process group twice: destroy_process_group() first"
        )
    limit = _timeout_setting(timeout)
    if pretence is not None:
        _pretend_world(world, pretence, limit, group_name)
        return
    choice = os.environ.get("TILEWORK_BACKEND") if backend is None else backend
    config = BackendConfig(choice)
    if choice is None and core_error() is not None:
        warnings.warn(
            f"using backend {config}: {core_error()}. Name a backend to silence this.",
            UserWarning,
            stacklevel=2,
        )
    notice_waits()
    owned = store is None
    if store is None:
        url = "env://" if init_method is None else init_method
        store, rank, world_size = _find_store(url, rank, world_size, limit)
        world.owned_store = store
    else:
        _check_store_arguments(init_method, rank, world_size)
    try:
        store.set_timeout(limit)
        if os.environ.get(REJOIN_VARIABLE) and owned and not world.state(_Rejoined).done:
            world.default_group = rejoin(world, store, rank, limit, pg_options)
            EndedRanks(store).remove(rank)
            world.state(_Rejoined).done = world.has_met = True
            world.default_group.successors = _SUCCESSORS
            return
        plan = _plan_world(world, store, rank, world_size, config, limit, group_name)
        world.default_group = plan.make(config, pg_options, fall_back=choice is None)
        world.default_group.successors = _SUCCESSORS
        world.seats, world.chooses_backend, world.has_met = plan.ranks, choice is None, True
    except BaseException:
        world.close()
        raise


def _pretend_world(world: World, pretence: Pretence, limit: timedelta, group_name: str) -> None:
    """Make the default group of a rank that has no peers, and a store of its own."""
    store, config = HashStore(limit), BackendConfig(Backend.PRETEND)
    world.owned_store = store
    ranks = tuple(range(pretence.ranks))
    name = group_name or DEFAULT_GROUP_NAME

    def meet(place: int, there: Store) -> None:
        with closing(World()) as other:
            plan = _plan_world(other, there, place, len(ranks), config, limit, name)
            if pretence.hosts > 1:  # else ranks introduce themselves in shared memory
                plan.introduce(config)

    pretence.meet((len(ranks),), lambda: counted(ranks, ranks, meet, 1))
    plan = GroupPlan(world, store, ranks, pretence.rank, name, limit)
    world.default_group = plan.make(config, None, fall_back=False)
    world.seats = ranks


def notice_waits() -> None:
    """Have threads that wait long report late ranks, and end waits in a circle. Idempotent."""
    notice_cycles()
    notice_late_ranks()


def _find_store(url: str, rank: int, size: int, limit: timedelta) -> tuple[Store, int, int]:
    try:
        return next(rendezvous(url, rank, size, timeout=limit))
    except (OSError, MemoryError) as error:
        raise lack_of_means(rank, f"a way to the job's store ({url})", error) from error


def _plan_world(
    world: World,
    store: Store,
    rank: int,
    size: int,
    config: BackendConfig,
    limit: timedelta,
    group_name: str,
) -> GroupPlan:
    """The plan of the default group, once all ranks have asked for the same."""
    ranks, name = tuple(range(size)), group_name or DEFAULT_GROUP_NAME
    with answers_within(limit):
        generation = InitGeneration(store, rank)
        wait = GroupWait(name, rank, ranks, generation.store)
        with told_to_all(wait):
            identity = identity_on(config)
            world.watch = wait.watch = RankWatch(generation.store, rank, size, identity)
    _agree(wait, f"{size} ranks, backend {config}", limit, generation.check)
    return GroupPlan(world, generation.store, ranks, rank, name, limit, wait=wait)


def _timeout_setting(timeout: timedelta | None) -> timedelta:
    if timeout is None:
        text = os.environ.get("TILEWORK_TIMEOUT")
        if text is None:
            return DEFAULT_TIMEOUT
        try:
            timeout = timedelta(seconds=float(text))
        except (ValueError, OverflowError):
            raise ValueError(
                f"TILEWORK_TIMEOUT must be a number of seconds, got {text!r}"
            ) from None
    if seconds_of(timeout) <= 0:
        raise ValueError(f"timeout must be positive, got {timeout}")
    return timeout


def _check_store_arguments(init_method: str | None, rank: int, world_size: int) -> None:
    if init_method is not None:
        raise ValueError(
            f"give either init_method or store, not both (got init_method={init_method!r})"
        )
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"with store, rank and world_size must be given, too, and 0 <= rank < world_size; got "
            f"rank={rank}, world_size={world_size}"
        )


class _Rejoined:
    """The mark of a rank that was let into the job: later groups are made as usual."""

    done = False


class _Successors:
    """Makes the group that replaces a group, by the functions of ``comm.elastic``."""

    def shrink(
        self, group: ProcessGroup, exclude: Sequence[int], timeout: timedelta | None
    ) -> ProcessGroup:
        return shrink(group, exclude, timeout)

    def grow(self, group: ProcessGroup, timeout: timedelta | None) -> ProcessGroup:
        return grow(group, timeout)


_SUCCESSORS = _Successors()


def shrink_group(
    ranks_to_exclude: Sequence[int] = (),
    group: AnyGroup = None,
    shrink_flags: int = 0,
    pg_options: Any = None,
    timeout: timedelta | None = None,
) -> ProcessGroup:
    """The group of the ranks of ``group`` that are left, after ranks were lost or are to leave.

    Collective over the ranks that are left; blocks. Call it after an operation has raised
    PeerLostError or CollectiveTimeoutError. The call aborts this rank's other groups, so that ranks
    that wait in another group come here, too. The ranks agree on who is left, even if more ranks
    die during the call. Each rank that calls and lives gets the same group; the old group is
    closed.

    The new group numbers the ranks in the old order; ``group.origins`` has the old numbers. If
    ``group`` is the default group, the new group becomes the default group: group ranks are the new
    global ranks, and every other group and mesh must be made again. The store stays, or is replaced
    by a new store if a lost rank served it.

    Args:
        ranks_to_exclude: Global ranks that are to leave; they do not call.
        group: None: the default group.
        shrink_flags: Accepted for torch's sake: waits of other ranks are always aborted.
        pg_options: Accepted for torch's sake: the group has the options of the old group.
        timeout: The time to wait for a rank whose process has not ended; a rank that comes later is
            out. None: the group's timeout, at most 30 s.

    Raises:
        ExcludedError: The others continued without this rank.
        DistBackendError: No group could be made.
        ValueError: This rank is to leave, or a rank to exclude is not in the group.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     if rank == 1:
        ...         return None  # and ends
        ...     try:
        ...         dist.barrier()
        ...     except dist.PeerLostError:
        ...         dist.shrink_group()
        ...     return dist.get_rank(), dist.get_world_size()
        >>> run_ranks(3, program)
        [(0, 2), None, (1, 2)]
    """
    resolved = resolve(group)
    if isinstance(resolved, NonMember):
        raise ValueError(f"this rank is not in {resolved!r}: call shrink_group on its ranks")
    return resolved.shrink(ranks_to_exclude, timeout)


def grow_group(group: AnyGroup = None, timeout: timedelta | None = None) -> ProcessGroup:
    """The default group with the ranks that were started again and wait to be let in.

    Collective over the group; blocks. Call it at a place where newcomers can take part in the
    following steps, such as the end of a step. If nobody waits, the result is the old group, after
    one small exchange. A newcomer waits in ``init_process_group`` (``tilework run --restarts``
    starts newcomers).

    The new group numbers the ranks in the order of the numbers that they were started with. If all
    ranks came back, every rank has the old number. ``group.origins`` has None for newcomers. All
    other groups and meshes must be made again. If a rank dies during the call, the group stays.

    Args:
        group: The default group; None means the default group.
        timeout: The time to make the new group in; None: the group's timeout, at most 30 s.

    Raises:
        DistBackendError: As any collective; the group is aborted then.
        ValueError: The group is not the default group.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     return dist.grow_group().size()  # nobody waits
        >>> run_ranks(2, program)
        [2, 2]
    """
    resolved = resolve(group)
    if isinstance(resolved, NonMember):
        raise ValueError(f"this rank is not in {resolved!r}: only the default group can grow")
    return resolved.grow(timeout)


def destroy_process_group(group: AnyGroup = None) -> None:
    """Leave ``group``, or all groups for None (or the default group). Not collective.

    Never waits for other ranks. Ranks that still need this one get a PeerLostError. Without
    this call, groups are left in order when the process ends.

    Raises:
        ValueError: The group is not registered, or there is none.

    Example: see :func:`init_process_group`.
    """
    world = current_world()
    resolved = resolve(group)
    if isinstance(resolved, NonMember):
        return
    world.record(resolved)
    if resolved is world.default_group:
        world.close()
    else:
        world.forget(resolved)


def abort_process_group(group: AnyGroup = None, reason: str = "abort was called") -> None:
    """Make every present and future operation on ``group`` raise, on all ranks of the group.

    The operations raise PeerLostError, as if this rank had died. Not collective; does not wait.

    Args:
        group: None: the default group.
        reason: The reason, for the other ranks' errors.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     if rank == 0:
        ...         return dist.abort_process_group(reason="the data is bad")
        ...     try:
        ...         dist.barrier()
        ...     except dist.PeerLostError as error:
        ...         return "the data is bad" in str(error)
        >>> run_ranks(2, program)
        [None, True]
    """
    resolved = resolve(group)
    if isinstance(resolved, ProcessGroup):
        resolved.abort(reason)


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonMember | None:
    """Make a group of some of the ranks.

    Collective over *all* ranks of the default group, members or not, in the same order
    everywhere; with ``use_local_synchronization``, over the members only. Blocks until these
    ranks called it with the same arguments.

    Args:
        ranks: Global ranks, in any order. None: all.
        timeout: As for init_process_group; None: the default group's.
        backend: As for init_process_group; None: the default group's.
        pg_options: Handed to the backend.
        use_local_synchronization: Only members need to call. Several groups made this way must
            be made in an order that cannot deadlock.
        group_desc: Describes the group in messages.
        device_id: Accepted for torch's sake.
        sort_ranks: True: ranks are numbered in ascending order within the group, whatever the order
            of ``ranks``; False: they are numbered in the order of ``ranks``.

    Returns:
        The group; on ranks outside it an object equal to ``GroupMember.NON_GROUP_MEMBER``, or
        None with ``use_local_synchronization``.

    Raises:
        ValueError: Some ranks do not exist, or are given twice.
        CollectiveMismatchError: Ranks called with different arguments.
        DistStoreError: Some rank did not call in time.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     even = dist.new_group([0, 2])
        ...     if dist.rank_not_in_group(even):
        ...         return None
        ...     x = torch.tensor([rank + 1.0])
        ...     dist.all_reduce(x, group=even)
        ...     return x.item()
        >>> run_ranks(3, program)
        [4.0, None, 4.0]
    """
    world = current_world()
    record = world.record(world.default())
    members = _check_ranks(ranks, record.group.size(), sort_ranks)
    me = get_rank()
    name = _next_name(world, members, use_local_synchronization)
    limit = record.timeout if timeout is None else _timeout_setting(timeout)
    pretence = current_pretence()
    config = record.config if backend is None or pretence else BackendConfig(backend)
    if use_local_synchronization and me not in members:
        return None
    store = PrefixStore(name, record.store)
    awaited = members if use_local_synchronization else record.group.global_ranks

    def meet(place: int, there: Store) -> None:
        wait = GroupWait(name, awaited[place], awaited, there, world.watch, list(world.records))
        _agree(wait, f"{_in_brief(members)}, backend {config}", limit)
        if pretence is not None and pretence.hosts > 1 and awaited[place] in members:
            place = members.index(awaited[place])
            GroupPlan(world, there, members, place, name, limit).introduce(config)

    if pretence is None:
        meet(awaited.index(me), store)
    else:
        call = f"new_group {_in_brief(members)}", (("new_group", members),), 0, call_site()
        pretence.note(PretendedCall(record.group.group_name, awaited, *call, is_check=True))
        pretence.meet((len(awaited), len(members)), lambda: counted(awaited, members, meet, 0))
    if me not in members:
        return NonMember(name, members)
    plan = GroupPlan(world, store, members, members.index(me), name, limit, group_desc or "")
    made = plan.make(config, pg_options, fall_back=False)
    made.successors = _SUCCESSORS
    return made


def split_group(
    parent_pg: AnyGroup = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Cut a group into parts. Collective over the ranks of ``parent_pg``; blocks.

    Args:
        parent_pg: The group to cut; None: the default group.
        split_ranks: The parts, the same on every rank: each a list of ranks *within* ``parent_pg``,
            in the order of the numbers in the part. No rank may be in two parts.
        timeout: As for new_group, like the rest.

    Returns:
        The part that this rank is in; None if it is in no part.

    Raises:
        ValueError: No part was given, a rank does not exist or is in two parts, ranks gave
            different parts, or this rank is not in ``parent_pg``.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     part = dist.split_group(split_ranks=[[0, 2], [1]])
        ...     return dist.get_process_group_ranks(part)
        >>> run_ranks(3, program)
        [[0, 2], [1], [0, 2]]
    """
    parent = resolve(parent_pg)
    if isinstance(parent, NonMember):
        raise ValueError(f"this rank is not in {parent!r}: call split_group on its ranks")

    def facts() -> dict[str, Any]:
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty: give the ranks of each part")
        listed = [rank for part in split_ranks for rank in part]
        _check_ranks(listed, parent.size())
        return {"split_ranks": [[int(rank) for rank in part] for part in split_ranks]}

    parts = agree_equal(facts, parent, "all ranks must cut the group equally:")[0]["split_ranks"]
    own = next((part for part in parts if parent.rank() in part), None)
    if own is None:
        return None
    ranks = [parent.global_ranks[rank] for rank in own]
    made = new_group(
        *(ranks, timeout, backend, pg_options),
        use_local_synchronization=True,
        group_desc=group_desc,
        sort_ranks=False,
    )
    assert isinstance(made, ProcessGroup)
    return made


def _check_ranks(
    ranks: Sequence[int] | None, world_size: int, in_order: bool = True
) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(world_size))
    members = tuple(int(rank) for rank in ranks)
    if in_order:
        members = tuple(sorted(members))
    if not members:
        raise ValueError("new_group needs at least one rank, got an empty list")
    outside = [rank for rank in members if not 0 <= rank < world_size]
    if outside:
        raise ValueError(
            f"new_group: ranks {outside} do not exist in a world of {world_size} ranks"
        )
    if len(set(members)) != len(members):
        raise ValueError(f"new_group: a rank is named twice in {list(ranks)}: name each once")
    return members


def _next_name(world: World, members: tuple[int, ...], local: bool) -> str:
    """The next group's name, equal on all makers; ``local``: only ``members`` make it."""
    if not local:
        return f"group_{next(world.group_count)}"
    count = world.local_counts[members] = world.local_counts.get(members, 0) + 1
    return f"local_{_digest(members)}_{count}"


def _digest(members: tuple[int, ...]) -> str:
    return hashlib.sha256(repr(members).encode()).hexdigest()[:12]


def _in_brief(members: tuple[int, ...]) -> str:
    """The ranks as a text that is equal for equal ranks, and short: each rank reads it."""
    if len(members) <= _RANKS_IN_FULL:
        return f"ranks {list(members)}"
    return f"{len(members)} ranks {members[0]}, …, {members[-1]} (digest {_digest(members)})"


def _agree(
    wait: GroupWait, asked: str, limit: timedelta, check: Callable[[], None] | None = None
) -> None:
    """Wait for all ranks, and check that they ask for the same group. Calls ``check`` meanwhile."""
    store, name, me = wait.store, wait.name, wait.me

    def meanwhile(missing: Collection[int]) -> None:
        if check is not None:
            check()
        wait.meanwhile(missing)

    with answers_within(limit), told_to_all(wait):
        first = store.compare_set("asked", "", f"rank {me} asks for {asked}").decode()
        if first.partition(" asks for ")[2] != asked:
            store.set(
                "disagreement",
                f"ranks disagree on group {name!r}: rank {me} asks for {asked}, but {first}. "
                f"Make the same groups in the same order with the same arguments on every rank",
            )
        position, count = wait.ranks.index(me), len(wait.ranks)
        part = position // BLOCK if wait.tells_identities else 0
        wait.barrier = barrier = Barrier(store, name, count, messages=wait.rolls, part=part)
        told = meet(position, barrier, limit, limit / 2, meanwhile)
        if wait.watch is not None and wait.tells_identities:
            wait.watch.learn_all_needed(told.decode())
        if store.check(["disagreement"]):
            raise CollectiveMismatchError(store.get("disagreement").decode())


def new_subgroups(
    group_size: int | None = None,
    group: AnyGroup = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str = "",
) -> tuple[ProcessGroup | NonMember | None, list[ProcessGroup | NonMember | None]]:
    """Cut the ranks into groups of ``group_size`` neighbours. Collective over all ranks.

    Args:
        group_size: Ranks per group; None: LOCAL_WORLD_SIZE, so one group per host.
        group: The group to cut; None: the default group.
        timeout: As for new_group, like the rest.

    Returns:
        This rank's group, and all groups.

    Raises:
        ValueError: The group's size is not a multiple of ``group_size``.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mine, _ = dist.new_subgroups(group_size=2)
        ...     return dist.get_process_group_ranks(mine)
        >>> run_ranks(4, program)
        [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    ranks = list(resolve(group).global_ranks)
    if group_size is None:
        group_size = int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))
    if group_size <= 0 or group_size > len(ranks):
        raise ValueError(
            f"the group_size must be between 1 and the world size {len(ranks)}, got {group_size}"
        )
    if len(ranks) % group_size:
        raise ValueError(
            f"the world size must be divisible by group_size: {len(ranks)} ranks cannot be cut "
            f"into groups of {group_size}"
        )
    cut = [ranks[i : i + group_size] for i in range(0, len(ranks), group_size)]
    return new_subgroups_by_enumeration(cut, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str = "",
) -> tuple[ProcessGroup | NonMember | None, list[ProcessGroup | NonMember | None]]:
    """Make one group per list of ranks; no rank may be in two groups. Collective over all ranks.

    Returns:
        This rank's group (NON_GROUP_MEMBER if it is in no group), and all groups.

    Raises:
        ValueError: No list was given, or a rank is in two of them.

    Example: ``new_subgroups_by_enumeration([[0, 2], [1]])``; see :func:`new_subgroups`.
    """
    if not ranks_per_subgroup_list:
        raise ValueError("The arg 'ranks_per_subgroup_list' cannot be empty")
    listed = [rank for ranks in ranks_per_subgroup_list for rank in ranks]
    twice = sorted({rank for rank in listed if listed.count(rank) > 1})
    if twice:
        raise ValueError(f"ranks {twice} are in more than one subgroup: {ranks_per_subgroup_list}")
    groups = [
        new_group(ranks, timeout, backend, pg_options, group_desc=group_desc)
        for ranks in ranks_per_subgroup_list
    ]
    own = next((g for g in groups if isinstance(g, ProcessGroup)), GroupMember.NON_GROUP_MEMBER)
    return own, groups
