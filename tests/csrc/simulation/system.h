// The system that simulated ranks run on. The functions of the C library that the core calls are
// defined here anew: those of threads and of time go to the schedule, those of processes answer for
// ranks, whose process ids are made up. A function that blocks and is not here would stop all ranks:
// tests/csrc/simulation/test_simulation.py lists what may be called.
#pragma once

#include <cstddef>

namespace tilework::simulation {

/// The process id of a rank.
int process_id(int rank);
/// What a rank that dies leaves behind: nothing; its process, as another program (exec); or its
/// number, which another process gets. Then the kernel grants no locks, which would tell.
enum class Remains { kNothing, kProgram, kNumber };
/// Of the machine: cores that each rank may run on, bytes of memory.
void set_machine(int cores, size_t memory_bytes, Remains remains);
/// Write memory of an operation that has raised: peers may still read it, since they throw away what
/// they read, but not write it.
void write_given_up(char* memory_begin, char value, size_t bytes);
/// Unmap what dead ranks have left mapped.
void unmap_leftovers();

}  // namespace tilework::simulation
