// A public operation (dist.all_reduce, say) as an object that takes its usual calls itself: a group on
// the fast path, tensors as they are. It finds the group and runs the operation without a
// frame of Python's between the program and the core, so what is recorded as the call site is the
// frame that runs. All other calls go to the Python function that it stands for, as if that had been
// called: those for which something is to be prepared or reported, and all while a profiler or debugger
// watches calls.
//
// It stands for the function in all other respects: its class, signature, attributes, and pickles are
// the function's.
#pragma once

#include <nanobind/nanobind.h>

namespace tilework {

/// The object for a function, which is named as FastPath knows the operation. `inputs`, `outputs`: the names
/// of the parameters that are those, "" for none. Other parameters have the names that torch gives
/// them: op, dst, src, group_dst, group_src, tag, group, async_op, input_split_sizes, output_split_sizes.
nanobind::object make_fast_function(nanobind::object function, const nanobind::str& inputs,
                                    const nanobind::str& outputs);

/// Set the ContextVar of a rank's World, and the classes of Worlds and groups, whose slots are read where
/// they lie: World.default_group; fast_path, group_ranks and global_ranks of a group.
void set_world_types(nanobind::object variable, nanobind::object world, nanobind::object group);

}  // namespace tilework
